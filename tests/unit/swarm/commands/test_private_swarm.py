"""`swarm private`: what it makes, that it never loses a key, and what it refuses."""

from __future__ import annotations

import datetime
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography import x509

from swarm.base.errors import ConfigError, IdentityError
from swarm.commands.certificates import BROKER_DAYS, general_name, names_in, password_line
from swarm.commands.private_swarm import Private
from swarm.directory.dht.addresses import check_join_address
from swarm.directory.identity import Identity
from swarm.link.network_key import NetworkKey
from tests.private_swarm import env_settings, make_private_swarm
from tests.telemetry_messages import identity

SECRETS = {"ca.key", "broker.key", "identity.key", "network.key", "passwords", "node.env", "health.env"}


MEMBER_FILES = ("identity.key", "node.env", "ca.crt", "network.key")


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Private:
    made = Private(tmp_path_factory.mktemp("private") / "new", ("broker.example", "203.0.113.5"), nodes=2)
    make_private_swarm(made)
    return made


def test_everything_is_there_and_for_its_owner_only(command: Private) -> None:
    names = set(files(command.folder))
    per_node = {f"node-{number}/{file}" for number in (1, 2) for file in MEMBER_FILES}
    broker = {f"broker/{file}" for file in ("broker.crt", "broker.key", "passwords")}
    others = {"ca.crt", "ca.key", "compose.env", "bootstrap/identity.key", "health/health.env", "health/ca.crt"}
    keys = {"network.key", "bootstrap/network.key", "health/network.key"}
    assert names == per_node | broker | others | keys
    assert len({(command.folder / name).read_bytes() for name in names if name.endswith("network.key")}) == 1
    NetworkKey.load(command.folder / "node-1" / "network.key")
    for path in command.folder.rglob("*"):
        if path.name in SECRETS or path.is_dir():
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    assert stat.S_IMODE(command.folder.stat().st_mode) == 0o700


def test_each_member_has_its_own_name_and_password(command: Private) -> None:
    urls = {}
    for name in ("node-1", "node-2"):
        peer = Identity.load_or_create(command.folder / name / "identity.key").peer_id
        urls[name] = env_settings(command.folder / name / "node.env")["CANOPY_MQTT"]
        assert urls[name].startswith(f"mqtts://{peer}:")
        assert urls[name].endswith("@broker.example:8883")
    health = env_settings(command.folder / "health" / "health.env")
    assert health["CANOPY_MQTT"].startswith("mqtts://health:")
    secrets = {url.split(":")[2].split("@")[0] for url in (*urls.values(), health["CANOPY_MQTT"])}
    assert len(secrets) == 3
    assert all(len(secret) == 32 for secret in secrets)
    check_join_address(health["CANOPY_JOIN"])
    assert health["CANOPY_JOIN"].startswith("/dns/broker.example/tcp/31337/p2p/")
    assert env_settings(command.folder / "compose.env") == {"CANOPY_JOIN": health["CANOPY_JOIN"]}


def test_the_certificate_names_the_hosts(command: Private) -> None:
    certificate = x509.load_pem_x509_certificate((command.folder / "broker" / "broker.crt").read_bytes())
    assert names_in(certificate) == [general_name("broker.example"), general_name("203.0.113.5")]
    left = certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    assert BROKER_DAYS - 1 <= left.days <= BROKER_DAYS


def test_again_changes_nothing_and_more_adds_what_is_missing(command: Private) -> None:
    before = files(command.folder)
    assert make_private_swarm(command).startswith("0 files made")
    assert files(command.folder) == before
    peer = identity(0).peer_id
    said = make_private_swarm(replace(command, nodes=3, peer=(peer,)))
    after = files(command.folder)
    assert {name: after[name] for name in before if name != "broker/passwords"} == {
        name: data for name, data in before.items() if name != "broker/passwords"
    }
    own = f"node-{peer[-8:]}"
    assert set(after) - set(before) == {
        *(f"node-3/{file}" for file in MEMBER_FILES),
        *(f"{own}/{file}" for file in MEMBER_FILES if file != "identity.key"),
    }
    lines = after["broker/passwords"].splitlines()
    assert lines[:3] == before["broker/passwords"].splitlines()
    assert len(lines) == 5
    assert f"/{own} " in said
    for name in set(after) - set(before):
        (command.folder / name).unlink()
    (command.folder / "broker" / "passwords").write_bytes(before["broker/passwords"])


def test_a_lost_env_file_means_a_new_password_and_one_line(command: Private) -> None:
    env, passwords = command.folder / "node-1" / "node.env", command.folder / "broker" / "passwords"
    old, lines = env.read_bytes(), passwords.read_text().splitlines()
    env.unlink()
    make_private_swarm(command)
    assert env.read_bytes() != old
    assert sorted(line.split(":")[0] for line in passwords.read_text().splitlines()) == sorted(
        line.split(":")[0] for line in lines
    )


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"host": ()}, "--host"),
        ({"host": ("two words",)}, "two words"),
        ({"host": ("broker.example", "other.example")}, "is not for other.example"),
        ({"bootstrap_host": "a/b"}, "a/b"),
        ({"nodes": -1}, "--nodes"),
        ({"nodes": 1_001}, "--nodes"),
        ({"peer": ("me",)}, "--peer"),
        ({"broker_port": 0}, "--broker-port"),
        ({"bootstrap_port": 65_536}, "--bootstrap-port"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(command: Private, changed: dict[str, object], says: str) -> None:
    before = files(command.folder)
    with pytest.raises(ConfigError) as caught:
        make_private_swarm(replace(command, **changed))  # type: ignore[arg-type]
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert files(command.folder) == before


@pytest.mark.parametrize("name", ["ca.key", "ca.crt", "broker/broker.crt", "broker/broker.key", "node-1/identity.key"])
def test_a_file_that_holds_something_else_is_left_alone(tmp_path: Path, command: Private, name: str) -> None:
    for path, data in files(command.folder).items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(data)
        (tmp_path / path).chmod(0o600)
    (tmp_path / name).write_bytes(b"nonsense")
    with pytest.raises((ConfigError, IdentityError)) as caught:
        make_private_swarm(replace(command, folder=tmp_path))
    assert name in str(caught.value)
    assert (tmp_path / name).read_bytes() == b"nonsense"


def test_a_folder_that_cannot_be_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"Not a directory|File exists"):
        make_private_swarm(Private(tmp_path / "file" / "inside", ("host",)))


@pytest.mark.needs_root
def test_what_is_added_belongs_to_whom_the_folder_belongs(tmp_path: Path, command: Private) -> None:
    make_private_swarm(replace(command, folder=tmp_path, nodes=0))
    os.chown(tmp_path / "broker", 1_883, 1_883)
    make_private_swarm(replace(command, folder=tmp_path, nodes=0, peer=(identity(0).peer_id,)))
    written = (tmp_path / "broker" / "passwords").stat()
    assert (written.st_uid, written.st_gid) == (1_883, 1_883)


def test_a_password_line_has_mosquittos_form() -> None:
    user, packed = password_line("me", "secret").split(":")
    assert user == "me"
    assert [len(part) for part in packed.split("$")] == [0, 1, 3, 16, 88]


@pytest.mark.parametrize("name", ["broker/passwords", "ca.key", "ca.crt", "broker/broker.key", "broker/broker.crt"])
def test_a_damaged_file_is_one_line(name: str, tmp_path: Path) -> None:
    damaged = tmp_path / "private" / name
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"\xff\xfe damaged")
    with pytest.raises(ConfigError, match=f"{name} cannot be read as what its name says; move it away") as caught:
        make_private_swarm(Private(tmp_path / "private", ("broker.example",), nodes=0))
    assert damaged.read_bytes() == b"\xff\xfe damaged"
    assert "\n" not in str(caught.value)
