"""The MQTT broker for telemetry: reachable, by TLS or not, with this user and password."""

from __future__ import annotations

import asyncio
import logging
import secrets
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import aiomqtt

from swarm.doctor.ladder import Diagnosis, ok, trouble, unknown
from swarm.doctor.probes import Resolve, TcpAnswer, knock
from swarm.errors import ConfigError
from swarm.telemetry.broker_address import BrokerAddress, parse_broker

CONNECT_S: Final = 5.0
_REFUSED: Final = ("not authorized", "bad user name or password", "code:4]", "code:5]", "code:134]", "code:135]")
"""What a broker's answer says where it knows no such user or password."""

BrokerLogin = Callable[[BrokerAddress], Awaitable[None]]
"""Connects and says who it is; raises what aiomqtt raises."""


async def look_at_broker(url: str | None, ca: Path | None, find: Resolve, login: BrokerLogin) -> Diagnosis:
    """Whether telemetry would arrive: name, port, TLS, password; the first that fails."""
    if url is None:
        return ok("no-broker", "none was named; a node works without telemetry")
    try:
        address = parse_broker(url, ca)
    except ConfigError as error:
        return trouble("broker-malformed", str(error), "--mqtt mqtt://HOST:PORT")
    found = (await find(address.host)).ips
    if not found:
        return trouble("broker-unnamed", "the broker's name is not found", "check how its name is written in --mqtt")
    if max([await knock(ip, address.port) for ip in found[:2]]) < TcpAnswer.OPEN:
        mend = "check its host and port, whether it runs, and its firewall"
        return trouble("broker-silent", f"nothing answers at the broker's port {address.port}", mend)
    try:
        if address.tls is not None:
            await _shake_hands(address, address.tls)
        await login(address)
    except TimeoutError:
        return unknown("the broker accepts connections and says nothing in time")
    except (aiomqtt.MqttError, OSError) as error:
        return _explained(error, address)
    return ok("broker", "takes telemetry" + (", by TLS" if address.tls is not None else ", in plain text"))


async def _shake_hands(address: BrokerAddress, tls: ssl.SSLContext) -> None:
    """TLS alone, so that its errors are told from the broker's."""
    async with asyncio.timeout(CONNECT_S):
        _, writer = await asyncio.open_connection(address.host, address.port, ssl=tls)
    writer.transport.abort()


def _explained(error: aiomqtt.MqttError | OSError, address: BrokerAddress) -> Diagnosis:
    causes = [error, error.__cause__, error.__context__]
    said = " ".join(str(one) for one in causes if one is not None)
    if any(isinstance(one, ssl.SSLCertVerificationError) for one in causes) or "CERTIFICATE_VERIFY_FAILED" in said:
        return trouble(
            "broker-untrusted", "the broker's certificate is not trusted", "--mqtt-ca FILE, as its operator gave it"
        )
    if "WRONG_VERSION_NUMBER" in said or "record layer failure" in said.lower():
        return trouble(
            "broker-plain",
            "the broker speaks no TLS at this port",
            "--mqtt mqtt://… instead of mqtts://, or its TLS port (8883)",
        )
    if any(sign in said.lower() for sign in _REFUSED):
        what = "this user and password" if address.user else "nobody without a password"
        text = f"the broker does not accept {what}" if address.user else f"the broker accepts {what}"
        return trouble(
            "broker-refuses",
            text,
            "export CANOPY_MQTT=mqtts://USER:PASSWORD@HOST:PORT with those that its operator gave you",
        )
    if address.tls is None:
        mend = "mqtts://… if it wants TLS; else check that it is an MQTT broker"
    else:
        mend = "mqtt://… if it speaks no TLS; else check that it is an MQTT broker"
    return trouble("broker-odd", "what answers at the broker's port does not speak MQTT as expected", mend)


async def login(address: BrokerAddress, limit_s: float = CONNECT_S) -> None:
    """TryConnect as a node does within some seconds, and leave."""
    client = aiomqtt.Client(
        address.host,
        address.port,
        username=address.user,
        password=address.password,
        tls_context=address.tls,
        identifier=f"canopy-doctor-{secrets.token_hex(6)}",
        timeout=limit_s,
        logger=logging.getLogger(f"{__name__}.mqtt"),
    )
    async with client:
        pass
