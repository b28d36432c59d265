"""Signatures as receivers verify them: by the specification's words, and by vectors made elsewhere."""

from __future__ import annotations

import base64
import hashlib
import hmac

import pytest

from proxy.core import signatures

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
BODY = b'{"test": 2432232314}'
ID, TIMESTAMP = "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330


def test_standard_webhooks_signature_is_the_published_vector() -> None:
    """From the Standard Webhooks libraries' own tests."""
    expected = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    assert signatures.standard(SECRET, ID, TIMESTAMP, BODY) == expected


def test_format_a_signs_the_time_and_the_body_with_the_secret_as_it_is_shown() -> None:
    signed = f"{TIMESTAMP}.{BODY.decode()}".encode()
    assert signatures.format_a(SECRET, TIMESTAMP, BODY) == hmac.new(SECRET.encode(), signed, hashlib.sha256).hexdigest()


def test_format_b_signs_the_body() -> None:
    assert signatures.format_b(SECRET, BODY) == "sha256=" + hmac.new(SECRET.encode(), BODY, hashlib.sha256).hexdigest()


def test_headers_of_format_a_are_the_specifications_and_the_standards() -> None:
    found = signatures.headers(event_type="log", event_id="evt_1", secrets=[SECRET], timestamp=TIMESTAMP, body=BODY)
    assert found == {
        "Content-Type": "application/json",
        "X-Service-Signature": signatures.format_a(SECRET, TIMESTAMP, BODY),
        "X-Service-Timestamp": str(TIMESTAMP),
        "webhook-id": "evt_1",
        "webhook-timestamp": str(TIMESTAMP),
        "webhook-signature": signatures.standard(SECRET, "evt_1", TIMESTAMP, BODY),
    }


def test_headers_of_format_b_are_the_specifications_and_the_standards() -> None:
    found = signatures.headers(
        event_type="NEW_BLOCK", event_id="evt_1", secrets=[SECRET], timestamp=TIMESTAMP, body=BODY
    )
    assert found["X-Platform-Signature"] == signatures.format_b(SECRET, BODY)
    assert found["X-Webhook-Event"] == "NEW_BLOCK"
    assert found["X-Webhook-Idempotency-Key"] == "evt_1"
    assert not [name for name in found if name.startswith("X-Service")]


def test_correction_is_named_as_such_in_format_b() -> None:
    found = signatures.headers(event_type="CORRECTION", event_id="e", secrets=[SECRET], timestamp=1, body=BODY)
    assert found["X-Webhook-Event"] == "CORRECTION"


@pytest.mark.parametrize("event_type", ["log", "NEW_BLOCK"])
def test_after_a_rotation_both_secrets_sign(event_type: str) -> None:
    old = signatures.secret_of(b"\x01" * 32)
    found = signatures.headers(
        event_type=event_type, event_id="e", secrets=[SECRET, old], timestamp=TIMESTAMP, body=BODY
    )
    alone = [
        signatures.headers(event_type=event_type, event_id="e", secrets=[each], timestamp=TIMESTAMP, body=BODY)
        for each in (SECRET, old)
    ]
    name = "X-Service-Signature" if event_type == "log" else "X-Platform-Signature"
    assert found[name] == alone[0][name]
    assert found[f"{name}-Previous"] == alone[1][name]
    assert found["webhook-signature"].split(" ") == [each["webhook-signature"] for each in alone]


def test_secret_is_text_with_its_prefix_around_the_key() -> None:
    key = bytes(range(32))
    secret = signatures.secret_of(key)
    assert secret == "whsec_" + base64.b64encode(key).decode()
    assert signatures.key_of(secret) == key
    with pytest.raises(ValueError, match="whsec_"):
        signatures.key_of("nothing")


def test_comparison_is_of_texts() -> None:
    assert signatures.matches("abc", "abc")
    assert not signatures.matches("abc", "abd")
    assert not signatures.matches("é", "e")
