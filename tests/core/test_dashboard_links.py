"""Links to the dashboard."""

from __future__ import annotations

import pytest

from proxy.core.dashboard_links import page_link, token_link


@pytest.mark.parametrize("address", ["https://rpc.example.com", "https://rpc.example.com/"])
def test_links_start_with_the_public_address(address: str) -> None:
    assert page_link(address, "#/alerts") == "https://rpc.example.com/dashboard#/alerts"
    assert token_link(address, "invitation", "abc") == "https://rpc.example.com/#invitation=abc"


def test_without_an_address_there_is_no_link_to_a_page() -> None:
    assert page_link("", "#/alerts") == ""
