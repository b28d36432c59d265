// btcd's rpcclient, unmodified. Its host may have a path, and the API key is the password.
package main

import (
	"encoding/json"
	"errors"
	"log"
	"os"

	"github.com/btcsuite/btcd/btcjson"
	"github.com/btcsuite/btcd/rpcclient"
	"github.com/btcsuite/btcd/wire"
)

func must[T any](value T, err error) T {
	if err != nil {
		log.Fatal(err)
	}
	return value
}

func main() {
	var task struct{ Host, Password, Raw string }
	if err := json.NewDecoder(os.Stdin).Decode(&task); err != nil {
		log.Fatal(err)
	}
	config := &rpcclient.ConnConfig{Host: task.Host, User: "any", Pass: task.Password, HTTPPostMode: true, DisableTLS: true}
	client := must(rpcclient.New(config, nil))
	hash := must(client.GetBlockHash(5))
	header := must(client.GetBlockHeader(hash))
	_, wrong := client.GetBlockHash(9999999)
	var refusal *btcjson.RPCError
	if !errors.As(wrong, &refusal) {
		log.Fatal(wrong)
	}
	batch := must(rpcclient.NewBatch(config))
	first, second := batch.GetBlockCountAsync(), batch.GetBlockHashAsync(5)
	if err := batch.Send(); err != nil {
		log.Fatal(err)
	}
	// The client asks which program the node is, because they take different params.
	_, err := client.SendRawTransaction(wire.NewMsgTx(2), false)
	var rejection *btcjson.RPCError
	if !errors.As(err, &rejection) {
		log.Fatal(err)
	}
	var sent string
	if task.Raw != "" {
		raw := must(json.Marshal(task.Raw))
		if err := json.Unmarshal(must(client.RawRequest("sendrawtransaction", []json.RawMessage{raw})), &sent); err != nil {
			log.Fatal(err)
		}
	}
	json.NewEncoder(os.Stdout).Encode(map[string]any{
		"height":   must(client.GetBlockCount()),
		"hash":     hash.String(),
		"header":   header.BlockHash().String(),
		"block":    must(client.GetBlockVerbose(hash)).Height,
		"batch":    []any{must(first.Receive()), must(second.Receive()).String()},
		"sent":     sent,
		"rejected": rejection.Code,
		"wrong":    refusal.Code,
	})
}
