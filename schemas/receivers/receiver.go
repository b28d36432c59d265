// A webhook receiver with Go's standard library: WEBHOOK_SECRET=whsec_… go run receiver.go
package main

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"io"
	"log"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"
)

const tolerance = 300 * time.Second

var secret = os.Getenv("WEBHOOK_SECRET")
var seen sync.Map // ids of processed events: keep them in your database

func sign(key []byte, text ...[]byte) []byte {
	mac := hmac.New(sha256.New, key)
	for _, part := range text {
		mac.Write(part)
	}
	return mac.Sum(nil)
}

func isRecent(seconds string) bool {
	sent, err := strconv.ParseInt(seconds, 10, 64)
	return err == nil && time.Since(time.Unix(sent, 0)).Abs() <= tolerance
}

// hmac.Equal compares in constant time.
func isEqual(one, other string) bool { return hmac.Equal([]byte(one), []byte(other)) }

// Standard Webhooks, sent with both formats: the key is the secret without whsec_, base64-decoded.
func standard(headers http.Header, body []byte) bool {
	id, stamp := headers.Get("webhook-id"), headers.Get("webhook-timestamp")
	key, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(secret, "whsec_"))
	if err != nil || !isRecent(stamp) {
		return false
	}
	expected := "v1," + base64.StdEncoding.EncodeToString(sign(key, []byte(id+"."+stamp+"."), body))
	for _, given := range strings.Fields(headers.Get("webhook-signature")) {
		if isEqual(given, expected) {
			return true
		}
	}
	return false
}

// Lower-case event types: the key is the whole secret, with whsec_.
func formatA(headers http.Header, body []byte) bool {
	stamp := headers.Get("X-Service-Timestamp")
	expected := hex.EncodeToString(sign([]byte(secret), []byte(stamp+"."), body))
	return isRecent(stamp) && isEqual(headers.Get("X-Service-Signature"), expected)
}

// Upper-case event types: the key is the whole secret, with whsec_.
func formatB(headers http.Header, body []byte) bool {
	return isEqual(headers.Get("X-Platform-Signature"), "sha256="+hex.EncodeToString(sign([]byte(secret), body)))
}

// One valid signature is enough.
func isGenuine(headers http.Header, body []byte) bool {
	return standard(headers, body) || formatA(headers, body) || formatB(headers, body)
}

func receive(reply http.ResponseWriter, request *http.Request) {
	body, err := io.ReadAll(request.Body)
	if err != nil || !isGenuine(request.Header, body) {
		reply.WriteHeader(http.StatusUnauthorized)
		return
	}
	var event struct {
		Id   string
		Data json.RawMessage
	}
	if err := json.Unmarshal(body, &event); err != nil {
		reply.WriteHeader(http.StatusBadRequest)
		return
	}
	if _, isKnown := seen.LoadOrStore(event.Id, true); !isKnown {
		log.Println(event.Id, string(event.Data))
	}
	reply.WriteHeader(http.StatusNoContent)
}

func main() {
	port := os.Getenv("PORT")
	if port == "" {
		port = "3000"
	}
	log.Fatal(http.ListenAndServe("127.0.0.1:"+port, http.HandlerFunc(receive)))
}
