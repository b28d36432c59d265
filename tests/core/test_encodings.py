"""Content encodings: choice, round trips with other implementations, bounds."""

from __future__ import annotations

import gzip
import random
import zlib

import brotli
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.encodings import (
    BROTLI,
    GZIP,
    IDENTITY,
    SMALLEST,
    ZSTD,
    EncodedResult,
    EncodedResults,
    GzipReader,
    StreamCompressor,
    TooMuchData,
    accepted,
    compress,
    compress_apart,
    decompress,
)


def plain(encoding: int, data: bytes) -> bytes:
    """Read by implementations that are not the ones which wrote it, where there is one."""
    if encoding == GZIP:
        return gzip.decompress(data)
    if encoding == BROTLI:
        whole: bytes = brotli.decompress(data)
        return whole
    reader = zstandard.ZstdDecompressor().decompressobj()
    found = reader.decompress(data)
    assert reader.eof
    assert not reader.unused_data
    return found


SAMPLES = (
    b"",
    b"a",
    b'"0x' + b"0" * 100_000 + b'"',
    random.Random(1).randbytes(300_000),
    b'{"address":"0x1234"},' * 20_000,
    bytes(random.Random(2).choices(b"0123456789abcdef", k=200_000)),
)


@pytest.mark.parametrize(
    ("header", "encoding"),
    [
        ("", IDENTITY),
        ("identity", IDENTITY),
        ("br", BROTLI),
        ("br, gzip;q=0.9", BROTLI),
        ("br;q=0", IDENTITY),
        ("br;q=0.5, *", GZIP),
        ("gzip", GZIP),
        ("x-gzip", GZIP),
        ("gzip, deflate, br", GZIP),
        ("gzip, deflate, br, zstd", ZSTD),
        ("GZIP;Q=0.5, zstd;q=0.4", GZIP),
        ("gzip;q=0", IDENTITY),
        ("gzip;q=0, zstd;q=0", IDENTITY),
        ("*", GZIP),
        ("gzip; q=0.000, *", IDENTITY),
        ("*;q=0", IDENTITY),
        ("zstd;q=1.0,gzip;q=1.0", ZSTD),
        ("gzip;q=nonsense", IDENTITY),
        (",,;;,=", IDENTITY),
    ],
)
def test_encoding_follows_the_weights(header: str, encoding: int) -> None:
    assert accepted(header) == encoding


@pytest.mark.parametrize(
    ("header", "encoding"),
    [
        ("gzip, deflate, br, zstd", BROTLI),
        ("gzip, deflate", GZIP),
        ("gzip, zstd", ZSTD),
        ("gzip, br;q=0.5", GZIP),
        ("", IDENTITY),
    ],
)
def test_files_are_sent_in_the_smallest_encoding_of_those_liked_best(header: str, encoding: int) -> None:
    assert accepted(header, SMALLEST) == encoding


@pytest.mark.parametrize("encoding", [GZIP, ZSTD, BROTLI])
@pytest.mark.parametrize("data", SAMPLES, ids=len)
def test_whole_streamed_and_joined_replies_read_the_same(encoding: int, data: bytes) -> None:
    assert plain(encoding, compress(encoding, data)) == data
    stream = StreamCompressor(encoding)
    pieces = [data[at : at + 70_000] for at in range(0, len(data), 70_000)]
    assert plain(encoding, b"".join(map(stream.feed, pieces)) + stream.finish()) == data
    assert plain(encoding, compress_apart(encoding, pieces)) == data
    if encoding == BROTLI:
        return
    prefix, suffix = b'{"jsonrpc":"2.0","id":1,"result":', b"}"
    assert plain(encoding, EncodedResult(encoding, data).between(prefix, suffix)) == prefix + data + suffix


@given(st.binary(max_size=5000), st.binary(max_size=1000), st.integers(1, 400))
def test_any_result_can_be_joined_with_any_id(data: bytes, prefix: bytes, times: int) -> None:
    for encoding in (GZIP, ZSTD):
        assert (
            plain(encoding, EncodedResult(encoding, data * times).between(prefix, b"}")) == prefix + data * times + b"}"
        )


def test_compressed_result_is_made_once_and_the_oldest_leave() -> None:
    kept = EncodedResults(400_000)
    results = [b"%d" % number * 50_000 for number in range(8)]
    first = kept.get(results[0], GZIP)
    assert kept.get(results[0], GZIP) is first
    assert kept.get(results[0], ZSTD) is not first
    for result in results:
        kept.get(result, GZIP)
    assert kept.bytes_used <= 400_000
    assert kept.get(results[0], GZIP) is not first


def test_gzip_is_read_in_pieces_up_to_a_limit() -> None:
    data = b"0" * 1_000_000
    packed = zlib.compress(data, 9, 31)
    reader = GzipReader(len(data))
    assert b"".join(reader.feed(packed[at : at + 100]) for at in range(0, len(packed), 100)) == data
    assert reader.is_whole
    assert decompress(packed, len(data)) == data
    for wrong, limit in (
        (packed, len(data) - 1),
        (packed[:-1], len(data)),
        (packed + b"x", len(data)),
        (b"plain", 100),
    ):
        with pytest.raises(TooMuchData):
            decompress(wrong, limit)
