"""Which URLs are a proxy's, and that a password is said to the proxy alone."""

from __future__ import annotations

import pytest

from swarm.base.errors import ConfigError
from swarm.link.egress.proxy import HttpProxy


@pytest.mark.parametrize(
    ("url", "proxy"),
    [
        ("http://proxy.example:8080", HttpProxy("proxy.example", 8080)),
        ("http://192.0.2.1/", HttpProxy("192.0.2.1", 3128)),
        ("http://[2001:db8::1]:80", HttpProxy("2001:db8::1", 80)),
        ("http://me:p%40ss@proxy:1", HttpProxy("proxy", 1, "me:p@ss")),
    ],
)
def test_a_url_is_read(url: str, proxy: HttpProxy) -> None:
    assert HttpProxy.parse(url) == proxy


@pytest.mark.parametrize(
    "url",
    [
        "",
        "proxy:8080",
        "https://secret@proxy",
        "socks5://secret@proxy:1",
        "http://secret@proxy:x",
        "http://secret@",
        "http://secret@proxy:99999",
        "http://secret@proxy/path",
        "http://secret@[::1",
        "http://secret@pröxy:1",
    ],
)
def test_what_is_no_proxy_is_refused_in_one_line_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        HttpProxy.parse(url)
    assert "CANOPY_PROXY" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_password_is_shown_nowhere_but_in_the_request() -> None:
    proxy = HttpProxy.parse("http://me:secret@[2001:db8::1]:80")
    assert "secret" not in f"{proxy!r} {proxy}"
    assert str(proxy) == "the proxy [2001:db8::1]:80"
    said = proxy.request("192.0.2.1:443").decode()
    assert said.startswith("CONNECT 192.0.2.1:443 HTTP/1.1\r\nHost: 192.0.2.1:443\r\n")
    assert said.endswith("Basic bWU6c2VjcmV0\r\n\r\n")
    assert "Authorization" not in HttpProxy("p", 1).request("h:1").decode()
