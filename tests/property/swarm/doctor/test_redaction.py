"""Nothing private comes through, wherever it stands in a text; what is not private stays as it is."""

from __future__ import annotations

import re
import string
from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.doctor.redaction import COMMON_NAMES, PUBLIC_HOSTS, PrivateWords, private_words, redact
from swarm.protocol.peer_keys import peer_id_of

LETTERS = string.ascii_letters + string.digits
NAMES = st.text(LETTERS, min_size=5, max_size=14).filter(lambda name: name.lower() not in COMMON_NAMES)
HOSTS = st.builds(lambda parts, top: ".".join([*parts, top]), st.lists(NAMES, min_size=1, max_size=3), st.sampled_from(
    ["example", "lan", "org"]
))  # fmt: skip
PASSWORDS = st.text(string.ascii_letters + string.digits + "!$%&*+-._~:/@#?", min_size=6, max_size=20)
IPV4, IPV6 = st.builds(IPv4Address, st.integers(0, 2**32 - 1)), st.builds(IPv6Address, st.integers(0, 2**128 - 1))
PEERS = st.binary(min_size=1, max_size=8).map(peer_id_of)
AROUND = st.sampled_from(
    [("", ""), ("at ", " it"), ("(", ")"), ("'", "'"), ("x=", ","), ("see ", ":"), ("/", "/x"), ("[", "]:80")]
)
SOME = settings(max_examples=40)
FIXED = "12.5 GiB of 64 GiB are free; node serve MODEL --layers 0-20 → pip install 'grpcio<2,>=1.85', ok"


@given(IPV4, AROUND, st.sampled_from(["", ":31337"]))
def test_no_ipv4_address_comes_through(ip: IPv4Address, around: tuple[str, str], port: str) -> None:
    shown = redact(f"{around[0]}{ip}{port}{around[1]}", PrivateWords())
    if not (ip.is_loopback or ip.is_unspecified):
        assert str(ip) not in shown
        assert re.search(r"\d+\.\d+\.\d+\.\d", shown) is None
    assert port in shown


@given(IPV6, AROUND, st.sampled_from(["", "%eth0"]))
def test_no_ipv6_address_comes_through(ip: IPv6Address, around: tuple[str, str], zone: str) -> None:
    for written in (str(ip), ip.exploded, str(ip).upper()):
        shown = redact(f"{around[0]}{written}{zone}{around[1]}", PrivateWords())
        if not (ip.is_loopback or ip.is_unspecified):
            assert written not in shown
            assert re.search(r"[0-9A-Fa-f]{1,4}:[0-9A-Fa-f]{1,4}:", shown) is None


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        ("192.168.1.23", "192.168.x.x"),
        ("10.7.7.7", "10.x.x.x"),
        ("172.20.1.1", "172.16.x.x"),
        ("100.70.1.1", "100.64.x.x"),
        ("169.254.3.4", "169.254.x.x"),
        ("8.8.8.8", "<address>"),
        ("127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", "0.0.0.0"),
        ("::1", "::1"),
        ("fe80::1%eth0", "<link-local address>"),
        ("fd00::7", "<private address>"),
        ("2001:4860:4860::8888", "<address>"),
        ("::ffff:8.8.8.8", "<address>"),
    ],
)
def test_of_an_address_its_kind_stays(address: str, kind: str) -> None:
    assert redact(f"at {address}, it", PrivateWords()) == f"at {kind}, it"


@SOME
@given(PEERS, AROUND)
def test_no_peer_id_comes_through(peer: str, around: tuple[str, str]) -> None:
    shown = redact(f"{around[0]}/ip4/203.0.113.5/tcp/31337/p2p/{peer}{around[1]}", PrivateWords())
    assert peer not in shown
    assert "/tcp/31337/p2p/Qm…" in shown


@SOME
@given(NAMES, HOSTS, st.sampled_from(["/home/{}", "/Users/{}", "/data/people/{}"]), AROUND)
def test_no_user_no_host_and_no_home_comes_through(user: str, host: str, home: str, around: tuple[str, str]) -> None:
    folder = home.format(user)
    private = private_words({}, folder, [user, host], [])
    shown = redact(f"{around[0]}{folder}/.config/canopy{around[1]} of {user} on {host}, {user}@{host}", private)
    for name in (folder, user, host, host.partition(".")[0]):
        assert re.search(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", shown, re.IGNORECASE) is None
    assert "~/.config/canopy" in shown


@SOME
@given(NAMES, PASSWORDS, HOSTS, st.sampled_from(["mqtts", "http", "socks5"]))
def test_no_password_of_a_url_comes_through(user: str, password: str, host: str, scheme: str) -> None:
    url = f"{scheme}://{user}:{password}@{host}:8883"
    shown = redact(f"cannot connect to {url} now", PrivateWords())
    assert password not in shown.replace(f"{scheme}://<host>:8883", "")
    assert shown == f"cannot connect to {scheme}://<host>:8883 now"


@SOME
@given(st.text(LETTERS, min_size=20, max_size=40), PASSWORDS, NAMES, HOSTS)
def test_no_secret_of_the_environment_comes_through(token: str, password: str, user: str, host: str) -> None:
    environment = {"HF_TOKEN": token, "MY_PASSWORD": password, "https_proxy": f"http://{user}:{token}x@{host}:3128"}
    private = private_words(environment, "", [], [])
    shown = redact(f"a {token} b {password} c hf_{token} d password={password} e {host} f {token}x", private)
    for secret in (token, password, host):
        assert secret not in shown.replace("<secret>", "").replace("<host>", "").replace("password=", "")


@SOME
@given(
    st.text(LETTERS + "-_.", min_size=8, max_size=40),
    st.sampled_from(
        [
            *(
                "--api-key {}",
                "--api-key={}",
                "--api-key '{}'",
                "--hf-token {}",
                "API_KEY={}",
                'export OPENAI_API_KEY="{}"',
            ),
            *("Authorization: Bearer {}", "authorization: Basic {}=", "x-api-key: {}", "bearer {}", "Bearer {}"),
            *('{{"api_key": "{}"}}', "{{'client_secret': '{}'}}", "password={}", "passphrase: {}", "--access-key {}"),
            *("sk-{}", "sk-proj-{}", "sk-ant-{}", "ghp_{}", "github_pat_{}", "hf_{}", "gsk_{}", "glpat-{}", "xoxb-{}"),
        ]
    ),
    AROUND,
)
def test_no_key_comes_through_that_its_name_or_its_beginning_tells(
    key: str, written: str, around: tuple[str, str]
) -> None:
    key = f"k{key.replace('.', 'x')}" if written.endswith(("_{}", "-{}")) else key
    once = redact(f"see {written.format(key)} {around[1]} end", PrivateWords())
    assert key not in once
    assert once.endswith(f"{around[1]} end")
    assert redact(once, PrivateWords()) == once


@pytest.mark.parametrize(
    "text",
    [
        "hf auth login, or export HF_TOKEN=…",
        "the broker does not accept this user and password",
        "--mqtt-ca FILE, or --network-key FILE",
        "basic checks pass, and risk-averse people",
        "the hub does not accept your token (401); wait",
        "pip install token-bucket==1",
    ],
)
def test_words_about_secrets_stay(text: str) -> None:
    assert redact(text, PrivateWords()) == text


@SOME
@given(st.text(LETTERS + "-_", min_size=1, max_size=60))
def test_no_invite_comes_through(rest: str) -> None:
    assert redact(f"use canopy://{rest} now", PrivateWords()) == "use canopy://… now"


@SOME
@given(st.text(max_size=80), NAMES, HOSTS, PEERS, st.tuples(IPV4, IPV6))
def test_twice_is_once(text: str, user: str, host: str, peer: str, ips: tuple[IPv4Address, IPv6Address]) -> None:
    private = private_words({}, f"/home/{user}", [user, host], [])
    for whole in (
        text,
        f"{text} /home/{user}/x {host}:80 {peer} {ips[0]}:1 [{ips[1]}]:2 mqtt://{user}:p@{host} {text}",
    ):
        once = redact(whole, private)
        assert redact(once, private) == once


@SOME
@given(st.lists(st.sampled_from(FIXED.split()), max_size=30))
def test_what_is_not_private_stays(words: list[str]) -> None:
    private = private_words({"HOME": "/root", "USER": "root"}, "/root", ["root", "localhost"], [])
    text = " ".join(words)
    assert redact(text, private) == text


@pytest.mark.parametrize("host", [*PUBLIC_HOSTS, "www.nvidia.com", "localhost", "HOST"])
def test_hosts_that_everybody_knows_stay(host: str) -> None:
    text = f"pip install torch --index-url https://{host}/whl/cu126"
    assert redact(text, private_words({}, "", [], [host, f"http://{host}:80"])) == text


def test_a_mend_keeps_its_placeholders() -> None:
    text = "export CANOPY_MQTT=mqtts://USER:PASSWORD@HOST:PORT"
    assert redact(text, PrivateWords()) == text
    assert redact("mqtts://USER:real@HOST:1", PrivateWords()) == "mqtts://HOST:1"


def test_peer_ids_of_other_keys_go_too() -> None:
    ed25519 = "12D3KooWGRUGd3Q9RcFBqNhYZbLhQpxSfEbjGZnSaZYAqcoVFaJe"
    assert redact(f"peer {ed25519}, it", PrivateWords()) == "peer Qm…, it"
    assert redact(f"/p2p/16{'Y' * 51}/x", PrivateWords()) == "/p2p/Qm…/x"


def test_addresses_inside_versions_are_told_apart() -> None:
    assert redact("Python 3.12.1, torch 2.6.0+cu126, driver 550.54.15", PrivateWords()).endswith("550.54.15")
    assert ip_address("1.2.3.4")
    assert redact("00:1b:44:11:3a:b7 at 10:11:33", PrivateWords()) == "<mac> at 10:11:33"
