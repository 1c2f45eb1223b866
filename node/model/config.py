"""The options of `node serve`: the command line is built from them, and defaults stand here only. Loads nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Annotated, Literal
from urllib.parse import urlsplit

import tyro

from swarm.base.cli_types import (
    Count,
    DayTimes,
    DeviceName,
    File,
    Folder,
    Found,
    Host,
    HostPort,
    Insecure,
    LanMode,
    Layers,
    MegabitsPerSecond,
    MegabytesPerSecond,
    Model,
    Name,
    NetworkKeyFile,
    Peer,
    Port,
    Relay,
    Revision,
    Seconds,
    Text,
    Url,
    headed,
)
from swarm.base.errors import ConfigError
from swarm.base.extras import require
from swarm.base.ids import PeerId
from swarm.base.layers import Span
from swarm.base.process_limits import check_threads
from swarm.base.quiet_hours import QuietHours
from swarm.base.quota import Preferred
from swarm.directory.dht.addresses import OPEN_SWARM, DhtConfig, Membership, listen_addresses
from swarm.directory.identity import default_identity_path
from swarm.directory.node_record import MAX_NAME_CHARACTERS, split_address
from swarm.directory.sealing import RecordError
from swarm.link.broker_address import BrokerAddress, parse_broker
from swarm.link.endpoint import is_loopback
from swarm.protocol.peer_keys import is_peer_id
from swarm.reach.relay.lending import NO_RELAY, lent_settings
from swarm.status.messages import DEFAULT_PREFIX, check_prefix

Dtype = Literal["auto", "float32", "float16", "bfloat16"]
Weights = Literal["auto", "bf16", "int8", "int4"]
Experts = Literal["device", "cpu"]
MAX_MBIT = 100_000


@headed(
    model=("layers", "num_layers", "revision", "dtype", "weights", "no_promise"),
    machine=("device", "threads", "kv_tokens", "no_graphs", "experts", "offload", "offload_folder", "offload_mb_per_s"),
    swarm=("join", "lan", "new", "network_key", "identity", "name", "drain"),
    network=("host", "port", "dht_port", "allow_private", "insecure"),
    reach=("announce_address", "relay", "no_port_mapping", "relay_port", "relay_mbit", "tls_port"),
    courtesy=(
        "prefer",
        "prefer_contributors",
        "pause_when_busy",
        "pause_on_battery",
        "quiet_hours",
        "pause_frees_memory",
        "max_mbit",
    ),
    monitoring=("mqtt", "mqtt_prefix", "mqtt_ca", "metrics_port", "metrics_host"),
)
@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Serve some layers of a model to the swarm."""

    layers: Layers = "auto"
    """Half-open range: 0-20 is layers 0…19; "auto" serves what the swarm needs most, and moves when that changes. For
    several models one for each, as 0-20,auto, or one for all."""
    model: Annotated[Model | None, tyro.conf.Positional] = None
    """Hub id, folder or GGUF file, or an invite (default: the invite's, CANOPY_MODEL, else the swarm's only model)."""
    more: Annotated[tuple[Model, ...], tyro.conf.Positional] = ()
    """Further models, which this machine serves too: on one port, with turns on one compute thread."""
    join: Annotated[tuple[Peer, ...], tyro.conf.UseAppendAction] = ()
    """Multiaddress of a peer of the swarm, or an invite; may be repeated (default: CANOPY_JOIN, else the swarm joined
    last; if there is none, a new one begins)."""
    lan: LanMode = "ask"
    """Without any of these: whether a swarm that machines of the local network announce is joined; ask asks once, at a
    terminal. With no, this node is not announced there either."""
    new: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Begin a new swarm, although one was joined before."""
    network_key: NetworkKeyFile = None
    membership: Found[Membership] = OPEN_SWARM
    """Of the swarm; not an option."""
    fingerprint: Found[str | None] = None
    """How that of the model begins, where whoever invites said so; not an option."""
    model_why: Found[str] = "as you asked"
    """Who named the model; not an option."""
    revision: Revision | None = None
    """Branch, tag or commit of a hub model (default: its main branch)."""
    num_layers: Count | None = None
    """With --layers auto: how many layers to hold (default: as many as fit the device's memory, and no more than keep
    up with the swarm's other machines)."""
    device: DeviceName = "auto"
    """cpu, cuda (NVIDIA, AMD by ROCm), cuda:1 …, xpu (Intel), mps (Apple); auto takes a GPU if there is one."""
    dtype: Dtype = "auto"
    """Compute type; auto is the swarm's, else float32 on a CPU and the checkpoint's own on a GPU."""
    weights: Weights = "auto"
    """What weights are held in: auto is as a quantised checkpoint has them, else the compute type; bf16 halves what
    float32 takes; int8 and int4 take about a half and a quarter of bf16 and change texts. A chain is of one format."""
    threads: Count | None = None
    """CPU threads for computing; give each of several nodes on one machine its share (default: all cores)."""
    kv_tokens: Count | None = None
    """KV cache in tokens, for all sessions together (default: from free memory)."""
    no_graphs: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Run the layers as their class does, without kernels and graphs of our own: slower, and in bfloat16 or float16 a
    text may depend on the tree's size. For comparing; a CPU always runs so."""
    no_promise: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Where a CPU multiplies with a published file's integers: compute faster, and a text may depend on the tree's size
    (class -k1 in place of -k2). A node that joins others follows the swarm all the same."""
    experts: Experts = "device"
    """Where the experts of a mixture are: on the device with the rest, or cpu: in host memory, where the CPU computes
    those that a sweep chose. A card then holds more layers, and a sweep takes as long as the CPU needs to read them."""
    offload: bool = False
    """Keep the layers' weights in host memory (a GPU) or in a mapped file (a CPU) and stream them through: two layers
    are held at a time, and a sweep takes as long as reading them all, however large its tree is."""
    offload_folder: Folder | None = None
    """With --offload: map the weights from files in this folder, also for a GPU (default: the temporary folder)."""
    offload_mb_per_s: MegabytesPerSecond | None = None
    """With --offload: read no faster than so many MB (10⁶ bytes) a second (default: as fast as it goes)."""
    drain: Seconds = 30.0
    """Seconds for which a node that was told to stop serves on until its sessions moved; a second signal ends it."""
    host: Host = "0.0.0.0"
    """IP address to listen on."""
    port: Port = 0
    """TCP port of the node's gRPC service; 0 takes a free one."""
    dht_port: Port = 0
    """TCP port of the DHT; 0 takes a free one."""
    announce_address: HostPort | None = None
    """Under which other machines reach this node, where that differs, as with port forwarding (default: as found)."""
    relay: Relay = "auto"
    """Where nobody can call this machine: be reached through relays that the swarm's peers lend (auto), through the one
    at HOST:PORT, or not at all (off)."""
    no_port_mapping: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Do not ask the home router to forward a port (PCP, NAT-PMP, UPnP)."""
    relay_port: Port = 0
    """TCP port of the relay that this node lends to others, where it is reached without one; 0 takes a free one."""
    relay_mbit: MegabitsPerSecond | None = None
    """Mbit/s that this relay carries at most, both ways counted; 0 lends none (default: a quarter of the measured
    uplink, 10 until it is measured)."""
    tls_port: Port | None = None
    """TCP port that offers this node's directory and relay in TLS, best 443, for machines whose network lets nothing
    else out; while this node is reached directly (default: none)."""
    insecure: Insecure = False
    """Speak plain text and announce no certificate: for a swarm on this machine's loopback addresses only."""
    allow_private: bool = False
    """Call machines at private addresses also where this one is announced under a public address. Without it strangers
    cannot use the node to look into its own network."""
    identity: File | None = None
    """Identity file (default: one per machine, in the user's configuration folder)."""
    name: Name | None = None
    """A name shown to others (default: none)."""
    prefer: Annotated[tuple[Text, ...], tyro.conf.UseAppendAction] = ()
    """Who comes first here: an IP address, a network such as 192.0.2.0/24, or a machine's peer id; may be repeated.
    Strangers share what these leave (default: nobody is preferred)."""
    prefer_contributors: Url | None = None
    """Address of a health page that you trust: whoever contributed by its list, and says who it is (`client --owner`),
    has more turns here than strangers, and fewer than whom you prefer (default: none)."""
    pause_when_busy: bool = False
    """Pause while other programs use the GPU; where the node computes on the CPU, while they use half of its cores."""
    pause_on_battery: bool = False
    """Pause while the machine runs on battery."""
    quiet_hours: DayTimes | None = None
    """Pause every day between two times, by this machine's clock, as 22:00-07:00 (default: never)."""
    pause_frees_memory: bool = False
    """Give the weights' memory back during a pause, and load them again after it."""
    max_mbit: MegabitsPerSecond | None = None
    """Send no more than so many Mbit (10⁶ bits) a second of sessions' data, and lend as a relay a quarter of that at
    most unless --relay-mbit says more; downloads and the DHT are not counted (default: as fast as it goes)."""
    mqtt: Url | None = None
    """MQTT broker for the swarm's health page: mqtt://host:port, or mqtts://user:password@host:port for TLS
    (default: the invite's, CANOPY_MQTT, else nothing is told)."""
    mqtt_prefix: Text = DEFAULT_PREFIX
    """What the topics begin with."""
    mqtt_ca: File | None = None
    """File of certificates to trust for an mqtts:// broker (default: the system's)."""
    metrics_port: Port | None = None
    """Serve /metrics for Prometheus on this TCP port; 0 takes a free one (default: off)."""
    metrics_host: Host = "127.0.0.1"
    """IP address on which the metrics are served: no password guards them."""

    @property
    def is_auto(self) -> bool:
        """Whether the swarm's needs choose the layers."""
        return self.layers.strip() == "auto"

    def check(self) -> None:
        """Refuse what is wrong for every model, device and swarm, before anything slow begins.

        Raises:
            ConfigError: names the option and what to write.
        """
        if self.metrics_port is not None:
            require("metrics", "--metrics-port")
        first, *others = self.of_models()
        for other in others:
            other.check()
        if not first.is_auto:
            Span.parse(first.layers)
            if self.num_layers is not None:
                raise ConfigError(f"--num-layers {self.num_layers} goes with --layers auto, not with {self.layers}")
        self._check_ports()
        check_threads(self.threads, "--threads")
        counts = (("--kv-tokens", self.kv_tokens), ("--num-layers", self.num_layers))
        for option, count in counts:
            if count is not None and count < 1:
                raise ConfigError(f"{option} {count}: give at least 1, or leave it out")
        if self.name is not None and not (len(self.name) <= MAX_NAME_CHARACTERS and self.name.isprintable()):
            raise ConfigError(f"--name {self.name!r}: give printable text of at most {MAX_NAME_CHARACTERS} characters")
        self._check_offload()
        if not 0 <= self.drain <= 3_600:
            raise ConfigError(f"--drain {self.drain:g}: give seconds from 0 to 3600")
        self._check_insecure()
        self._check_relay()
        self._check_courtesy()
        check_prefix(self.mqtt_prefix)
        self.broker()
        listen_addresses(self.dht())

    def of_models(self) -> list[ServeConfig]:
        """The options of each model; those of the first know of the others.

        Raises:
            ConfigError: the layers are not those of so many models.
        """
        layers = self.layers.split(",")
        if len(layers) not in (1, 1 + len(self.more)):
            raise ConfigError(f"--layers {self.layers}: give one range for each of {1 + len(self.more)} models, or one")
        spans = layers * (1 + len(self.more)) if len(layers) == 1 else layers
        first = replace(self, layers=spans[0])
        membership = replace(self.membership, note_model=None)  # the first is remembered
        alone = replace(self, more=(), fingerprint=None, revision=None, membership=membership)
        others = zip(spans[1:], self.more, strict=True)
        return [first, *(replace(alone, layers=span, model=model) for span, model in others)]

    def broker(self) -> BrokerAddress | None:
        """Where telemetry goes, if it goes anywhere.

        Raises:
            ConfigError: the URL is none, or the certificates cannot be read.
        """
        if self.mqtt is not None:
            return parse_broker(self.mqtt, self.mqtt_ca)
        if self.mqtt_ca is not None:
            raise ConfigError(f"--mqtt-ca {self.mqtt_ca} goes with --mqtt mqtts://host:port")
        return None

    def quiet(self) -> QuietHours | None:
        """The hours in which the node pauses, if there are any.

        Raises:
            ConfigError: they are none.
        """
        return None if self.quiet_hours is None else QuietHours.parse(self.quiet_hours)

    def _check_ports(self) -> None:
        ports = {"--port": self.port, "--dht-port": self.dht_port}
        ports |= {"--metrics-port": self.metrics_port or 0, "--tls-port": self.tls_port or 0}
        for option, port in ports.items():
            if not 0 <= port < 65_536:
                raise ConfigError(f"{option} {port}: a TCP port is 1 to 65535, or 0 for a free one")
        lent_settings(PeerId(""), self.relay_mbit or 0.0, host=self.host, port=self.relay_port)
        if self.tls_port is not None and self.relay_mbit == 0:
            raise ConfigError(NO_RELAY)

    @property
    def preferred(self) -> Preferred:
        """The addresses, networks and machines that `--prefer` names.

        Raises:
            ConfigError: it names nobody.
        """
        peers = frozenset(filter(is_peer_id, self.prefer))
        return Preferred(tuple(map(_network, (name for name in self.prefer if name not in peers))), peers)

    @property
    def contributors_url(self) -> str | None:
        """Where the list of contributors is read.

        Raises:
            ConfigError: others on the way there could change it.
        """
        text = self.prefer_contributors
        if text is None:
            return None
        try:
            url = urlsplit(text)
            is_safe = bool(url.hostname) and (url.scheme == "https" or (url.scheme == "http" and url.hostname in _OWN))
        except ValueError:
            is_safe = False
        if not is_safe:
            raise ConfigError(f"--prefer-contributors {text}: give https://HOST, or http:// of this machine's own")
        return f"{url.scheme}://{url.netloc}{url.path.rstrip('/')}/api/v1/contributors"

    def _check_courtesy(self) -> None:
        self.quiet()
        _ = self.contributors_url
        _ = self.preferred
        if self.max_mbit is not None and not 1 <= self.max_mbit <= MAX_MBIT:
            raise ConfigError(f"--max-mbit {self.max_mbit:g}: give 1 to {MAX_MBIT}, or leave it out")

    def _check_insecure(self) -> None:
        if not self.insecure:
            return
        if self.membership.network is not None:
            raise ConfigError("--insecure: a private swarm keeps strangers out by TLS; leave it out")
        if not is_loopback(self.host):
            raise ConfigError(f"--insecure goes with --host 127.0.0.1, not with {self.host}: links would be readable")
        if not is_loopback(_host(self.announce_address) or self.host):
            raise ConfigError(f"--insecure is for this machine alone: {self.announce_address} is for others")

    def _check_relay(self) -> None:
        if self.relay in ("auto", "off"):
            return
        try:
            split_address(self.relay)
        except RecordError:
            raise ConfigError(f"--relay {self.relay!r}: write auto, off, or a relay's host:port") from None

    def _check_offload(self) -> None:
        rate, folder = self.offload_mb_per_s, self.offload_folder
        if not self.offload:
            given = "--offload-mb-per-s" if rate is not None else "--offload-folder" if folder is not None else None
            if given is not None:
                raise ConfigError(f"{given} goes with --offload")
            return
        if self.experts == "cpu":
            raise ConfigError("--experts cpu: with --offload all weights are in host memory; give one of the two")
        if self.is_auto:
            raise ConfigError("--offload needs --layers START-END: how many layers fit is not what limits it")
        if rate is not None and not 0 < rate < math.inf:
            raise ConfigError(f"--offload-mb-per-s {rate:g}: give more than 0, or leave it out")
        if folder is not None and not folder.is_dir():
            raise ConfigError(f"--offload-folder {folder}: there is no such folder")

    def dht(self) -> DhtConfig:
        """How this node takes part in the DHT.

        Raises:
            ConfigError: the announced address is malformed.
        """
        return DhtConfig(
            join=self.join,
            host=self.host,
            port=self.dht_port,
            announce_host=_host(self.announce_address),
            identity_path=self.identity or default_identity_path(),
            allow_private=self.allow_private,
            membership=self.membership,
        )


_OWN = frozenset({"127.0.0.1", "localhost", "::1"})


def _host(address: str | None) -> str | None:
    """The host of `host:port`, with which the DHT is announced too."""
    if address is None:
        return None
    try:
        return split_address(address)[0]
    except RecordError:
        raise ConfigError(f"--announce-address {address!r}: write host:port, such as 203.0.113.7:31338") from None


def _network(name: str) -> IPv4Network | IPv6Network:
    try:
        return ip_network(name, strict=False)
    except ValueError:
        raise ConfigError(f"--prefer {name}: give an IP address, a network as 192.0.2.0/24, or a peer id") from None
