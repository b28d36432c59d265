"""URIs of tokens: every form that contracts hold, and none that leads where it should not."""

from __future__ import annotations

from base64 import b64encode

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.uris import LONGEST, Gateways, InlineDocument, RemoteDocument, locate, over_http, quoted, shown, with_id

GATEWAYS = Gateways("https://gate.example.com", "https://weave.example.com")
V0 = "QmYwAPJzv5CZsnA625s3Xf2nemtYgPpHdWEz79ojWnPbdG"
V1 = "bafybeigdyrzt5sfp7udm7hu76uh7y26nf3efuylqabf3oclgtqy55fbzdi"
KEY = "k51qzi5uqu5dlvj2baxnqndepeb86cbk3ng7n3i46uzyxzyqj2xjonzllnv0v8"
TX = "bNbA3TEQVL60xlgCcqdz4ZPHFZ711cZ3hmkpGttDt_U"


# Document locations


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        (f"ipfs://{V1}/2.json", f"/ipfs/{V1}/2.json"),
        (f"ipfs://{V0}", f"/ipfs/{V0}"),
        (f"ipfs://ipfs/{V0}/1", f"/ipfs/{V0}/1"),
        (f"ipfs:/{V0}/1", f"/ipfs/{V0}/1"),
        (f"ipfs:{V0}", f"/ipfs/{V0}"),
        (f"IPFS://{V0}/A.json", f"/ipfs/{V0}/A.json"),
        (f"/ipfs/{V0}/1", f"/ipfs/{V0}/1"),
        (f"ipfs/{V0}/1", f"/ipfs/{V0}/1"),
        (V0, f"/ipfs/{V0}"),
        (f"  {V1}\n", f"/ipfs/{V1}"),
        (f"https://ipfs.io/ipfs/{V0}/1.json", f"/ipfs/{V0}/1.json"),
        (f"http://127.0.0.1:8080/ipfs/{V0}", f"/ipfs/{V0}"),
        (f"https://{V1}.ipfs.dweb.link/1.json", f"/ipfs/{V1}/1.json"),
        (f"ipfs://{V0}/a b#1.json", f"/ipfs/{V0}/a%20b%231.json"),
        (f"ipfs://{V0}/Ünï.json", f"/ipfs/{V0}/%C3%9Cn%C3%AF.json"),
        (f"ipfs://{V0}/100%.json", f"/ipfs/{V0}/100%25.json"),
        (f"ipfs://{V0}/a%20b?x=1", f"/ipfs/{V0}/a%20b?x=1"),
        (f"ipns://{KEY}/1", f"/ipns/{KEY}/1"),
        ("ipns://docs.example.com/1", "/ipns/docs.example.com/1"),
    ],
)
def test_content_is_read_through_our_own_gateway(uri: str, path: str) -> None:
    assert locate(uri, GATEWAYS) == RemoteDocument(GATEWAYS.ipfs + path, own=True)


@pytest.mark.parametrize(
    ("uri", "path"), [(f"ar://{TX}", f"/{TX}"), (f"ar://{TX}/7.json", f"/{TX}/7.json"), (f"ar:{TX}?x", f"/{TX}?x")]
)
def test_weave_is_read_through_our_own_gateway(uri: str, path: str) -> None:
    assert locate(uri, GATEWAYS) == RemoteDocument(GATEWAYS.arweave + path, own=True)


@pytest.mark.parametrize(
    "path",
    [
        *("/../../api/v0/pin", "/a/../../x", "/%2e%2e/x", "/.%2E/x", "/%2E%2e%2f%2e%2e/x", "/a%2F..%2f..%2Fx"),
        *("/..\\x", "/..%5Cx", "/.."),
    ],
)
def test_path_never_leads_out_of_its_content(path: str) -> None:
    """The gateway is the operator's, and may be private: only what is named by its content may be asked of it."""
    for uri in (f"ipfs://{V0}{path}", f"ipns://{KEY}{path}", f"ar://{TX}{path}"):
        assert locate(uri, GATEWAYS) is None
    found = locate(f"https://elsewhere.example.com/ipfs/{V0}{path}", GATEWAYS)
    assert not (isinstance(found, RemoteDocument) and found.own)
    assert not isinstance(found, InlineDocument)


@pytest.mark.parametrize(
    "uri",
    ["", " ", "this is no URI", "ipfs://", "ipfs://burned", "ipfs://../api", "ipns://", "ipns://../x", "ar://short", "ar://",
     "ftp://example.com/1", "file:///etc/passwd", "javascript:alert(1)", "/etc/passwd", "data:", "data:x;base64,???",
     "mailto:x@example.com", "//example.com/1", "example.com/1.json"],
)  # fmt: skip
def test_unsupported_uri_has_no_location(uri: str) -> None:
    assert locate(uri, GATEWAYS) is None


@pytest.mark.parametrize(
    ("uri", "url"),
    [
        ("https://example.com/1.json", "https://example.com/1.json"),
        ("HTTPS://example.com/My NFT.json", "HTTPS://example.com/My%20NFT.json"),
        ("http://127.0.0.1:1/6.json", "http://127.0.0.1:1/6.json"),
        ("https://example.com/ipfs/not-a-cid", "https://example.com/ipfs/not-a-cid"),
        ("https://example.com/a\tb\u202e", "https://example.com/a%09b%E2%80%AE"),
    ],
)
def test_web_address_is_external(uri: str, url: str) -> None:
    assert locate(uri, GATEWAYS) == RemoteDocument(url, own=False)


PLAIN = '{"name":"Ünï 100% {x} #1"}'
ENCODED = b64encode(PLAIN.encode()).decode()


@pytest.mark.parametrize(
    "uri",
    [
        f"data:application/json;base64,{ENCODED}",
        f"data:application/json;base64,{ENCODED.rstrip('=')}",
        f"data:application/json;charset=utf-8;base64,{ENCODED}",
        f"data:application/json;base64,{ENCODED.replace('=', '%3D').replace('+', '-').replace('/', '_')}",
        f"data:application/json;base64, {ENCODED}\n",
        f"data:application/json,{PLAIN}",
        f"data:application/json;utf8,{PLAIN}",
        f"DATA:Application/JSON;charset=utf-8,{PLAIN}",
        "data:application/json,%7B%22name%22%3A%22%C3%9Cn%C3%AF%20100%25%20%7Bx%7D%20%231%22%7D",
        PLAIN,
    ],
)
def test_document_may_be_the_uri_itself(uri: str) -> None:
    assert locate(uri, GATEWAYS) == InlineDocument("application/json", PLAIN.encode())


def test_data_without_a_type_is_text_and_commas_are_part_of_it() -> None:
    assert locate("data:,a,b", GATEWAYS) == InlineDocument("text/plain", b"a,b")
    assert locate("<svg/>", GATEWAYS) == InlineDocument("image/svg+xml", b"<svg/>")


def test_id_is_substituted_as_64_digits() -> None:
    """The example of ERC-1155: 314592 is 0x4CCE0."""
    assert with_id("https://x/{id}.json", 314592) == f"https://x/{'0' * 59}4cce0.json"
    assert with_id("{id}{id}", 2**256 - 1) == "f" * 128
    assert with_id("https://x/1", 5) == "https://x/1"


# Images


@pytest.mark.parametrize(
    ("uri", "as_shown", "on_the_web"),
    [
        (f"ipfs://{V1}/1.png", f"ipfs://{V1}/1.png", f"{GATEWAYS.ipfs}/ipfs/{V1}/1.png"),
        (f"ipfs://ipfs/{V1}/1 1.png", f"ipfs://{V1}/1%201.png", f"{GATEWAYS.ipfs}/ipfs/{V1}/1%201.png"),
        (V0, f"ipfs://{V0}", f"{GATEWAYS.ipfs}/ipfs/{V0}"),
        (f"https://ipfs.io/ipfs/{V0}", f"https://ipfs.io/ipfs/{V0}", f"{GATEWAYS.ipfs}/ipfs/{V0}"),
        (f"ar://{TX}", f"ar://{TX}", f"{GATEWAYS.arweave}/{TX}"),
        ("https://example.com/a b.png", "https://example.com/a%20b.png", "https://example.com/a%20b.png"),
        ("data:image/png;base64,AA\nBB", "data:image/png;base64,AABB", None),
        ("<svg fill='#06c'/>", "data:image/svg+xml;utf8,%3Csvg%20fill='%2306c'/%3E", None),
        ("data:image/svg+xml;utf8,<svg fill='#06c'/>", "data:image/svg+xml;utf8,%3Csvg%20fill='%2306c'/%3E", None),
    ],
)
def test_image_is_shown_as_it_is_named_and_as_it_is_on_the_web(uri: str, as_shown: str, on_the_web: str | None) -> None:
    assert shown(uri) == as_shown
    assert over_http(as_shown, GATEWAYS) == on_the_web


@pytest.mark.parametrize(
    "uri",
    ["", "  ", "javascript:alert(1)", "data:text/html,<script>", "data:application/json,{}", "vbscript:x", "file:///etc/passwd",
     "1.png", "data:image/png;base64," + "A" * LONGEST, "about:blank", " javascript:alert(1)", "JAVASCRIPT:1", "data:,x"],
)  # fmt: skip
def test_uri_that_is_no_image_is_not_shown(uri: str) -> None:
    assert shown(uri) is None


@settings(deadline=None)
@given(st.text(max_size=60))
def test_no_text_breaks_anything_and_what_is_shown_is_plain_ascii(text: str) -> None:
    for uri in (
        text,
        f"ipfs://{V0}/{text}",
        f"https://example.com/{text}",
        f"data:image/svg+xml,{text}",
        f"data:x;base64,{text}",
    ):
        found = locate(uri, GATEWAYS)
        assert found is None or isinstance(found, InlineDocument | RemoteDocument)
        image = shown(uri)
        assert image is None or (image.isascii() and image.isprintable() and " " not in image)


@settings(deadline=None)
@given(st.text(max_size=60))
def test_quoting_twice_is_quoting_once(text: str) -> None:
    assert quoted(quoted(text)) == quoted(text)
