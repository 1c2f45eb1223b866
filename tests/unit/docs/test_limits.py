"""The numbers of `docs/reference/limits.md` are those of the code: each row's text is made of the constants."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from client.dialogue import rendering
from node.life import connection_guard, contributors, span_host
from node.life.reach import circuits, punch, standing
from node.session import admission, context, hop_session, receipts, service, settle, table, waiting
from swarm.base import logs, quota
from swarm.base.workers import WorkLease
from swarm.compute import grammars, kv_pool
from swarm.directory import peer_proof
from swarm.directory.dht import about, addresses, dialback, process, relay_offers
from swarm.directory.dht import protocol as directory
from swarm.directory.joining import command, invite, lan, lan_choice, remembered, resolve
from swarm.files import tokenizer_trial
from swarm.link import successor
from swarm.link.dial import SERVER_OPTIONS
from swarm.link.egress import streams
from swarm.protocol import limits, manifest, pick_rules
from swarm.reach.paths import call_back, hole, local_dialler, way
from swarm.reach.paths import punch as punching
from swarm.reach.relay import openings, server
from swarm.reach.relay.visits import RelayLimits
from swarm.trust import receipt

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "limits.md"
SERVER = {name.rpartition(".")[2]: int(value) for name, value in SERVER_OPTIONS}
STRIKES, GRAMMARS = admission.LIMITS.strikes, admission.GRAMMARS
HOLDINGS, RATES = admission.LIMITS.holdings, admission.LIMITS.rates
RELAY = RelayLimits()
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def n(number: float) -> str:
    """A number as the page writes it."""
    return f"{number:,.10g}" if number < 1_000 else f"{number:,.0f}"


def lease_of(one: WorkLease) -> str:
    return f"{n(one.cpu_s)} s of a processor, {n(one.wall_s)} s in all"


def rate(kind: str, unit: str = "/s") -> str:
    return f"{n(RATES[kind].per_key)}{unit}, {n(RATES[kind].burst)} at once"


def refusals(rule: quota.StrikeRule) -> str:
    return f"refused for {n(rule.refuse_s)} s, {n(2 * rule.refuse_s)} s, … {n(rule.longest_s)} s"


NODE = {
    "connections": f"{n(span_host.MAX_CONNECTIONS)}, and half of the files or all but {n(span_host.FILES_KEPT)}",
    "connections of an address": n(connection_guard.PER_ADDRESS),
    "handshake; idle connection": f"{n(SERVER['server_handshake_timeout_ms'] / 1e3)} s; "
    f"{n(SERVER['max_connection_idle_ms'] / 1e3)} s",
    "streams of a connection": n(SERVER["max_concurrent_streams"]),
    "streams without a session": f"{n(HOLDINGS[admission.WAITING].per_key)} of an address, and one per session that it "
    f"has; {n(HOLDINGS[admission.WAITING].total)} in all",
    "first message": f"{n(service.FIRST_MESSAGE_S)} s",
    "new streams": f"{n(RATES[admission.FIRST].burst)} at once and one in {n(1 / RATES[admission.FIRST].per_key)} s, "
    f"which no crowd can use up; then {rate(admission.OPENED)}; {n(RATES[admission.OPENED].total)}/s in all",
    "new routes of an address's sessions": rate(admission.REROUTED),
    "faults that a machine reports": f"{n(successor.MAX_FAULTS)} in one generation of a session; then it is left",
    "Hello, Info, Hold, receipts": rate(admission.CALLS),
    "lists of weight files": f"{n(RATES[admission.MANIFESTS].burst)} at once, then one in "
    f"{n(1 / RATES[admission.MANIFESTS].per_key)} s; {n(RATES[admission.MANIFESTS].total)}/s in all; "
    f"{n(manifest.MAX_MANIFEST_BYTES / MIB)} MiB, {n(manifest.MAX_WEIGHT_FILES)} files",
    "parts of what was settled": f"{n(RATES[admission.SHOWN].burst)} at once, then "
    f"{n(RATES[admission.SHOWN].per_key)}/s; {n(RATES[admission.SHOWN].total)}/s in all; "
    f"{n(limits.SHOWN_BYTES / MIB)} MiB each; kept for {n(settle.SETTLE_S)} s, of "
    f"{n(settle.MAX_SETTLED)} sessions at most",
    "sessions of an address": f"{n(HOLDINGS[admission.SESSIONS].per_key)}; then its own idlest gives way, after "
    f"{n(table.IDLE_S)} s without a sweep, or {n(table.UNUSED_S)} s where it never had one",
    "work of a session": f"{n(table.MAX_SWEEPS)} sweeps unanswered, {n(table.MAX_NODES)} live nodes",
    "a session without its client": f"{n(hop_session.ORPHAN_S)} s after its stream broke, "
    f"{n(hop_session.HOLD_S)} s where its client asks for that; {n(hop_session.IDLE_S / 60)} min without a word",
    "what is kept for repairs": f"{n(context.JOURNAL_BYTES / GIB)} GiB of all sessions",
    "texts that are kept": f"at most {n(kv_pool.MAX_BLOCKS)} blocks of {n(limits.BLOCK_TOKENS)} tokens, "
    f"{n(kv_pool.KEPT_S / 60)} min after their last use",
    "KV that a session takes beyond what it was expected to": f"of those that rest for {n(table.REST_S)} s; running "
    f"texts together {n(100 * table.OVERCOMMITTED)} % more than there is",
    "owners of one network (IPv4 /24, IPv6 /48)": f"{n(admission.NETWORK_OWNERS)} count, in turns, KV and places",
    "places for sessions that wait for room": f"{n(waiting.MAX_WAITING)}; {n(waiting.WAIT_S)} s each, "
    f"{n(waiting.SILENT_S)} s without a word",
    "turns, room and places of whom `--prefer` names": f"{n(admission.PREFERRED_SHARES)} × an owner's",
    "the same of proven contributors, where `--prefer-contributors` is given": f"{contributors.LEAST_SHARES} × to "
    f"{contributors.MOST_SHARES} × an owner's, from all its addresses together; {n(contributors.MAX_CONTRIBUTORS)} of "
    f"them, a list of {contributors.MAX_ANSWER_BYTES // KIB} KiB, every {n(contributors.READ_S / 60)} min, "
    "forgotten after an hour",
    "receipts": f"{n(limits.MAX_RECEIPT_BYTES)} bytes, {receipt.MAX_RECEIPT_HOPS} machines; of sessions that are over, "
    f"{n(receipts.CLAIM_S)} s long, {n(receipts.MAX_CLAIMS)} of them; {n(receipts.MAX_WAITING)} wait to be published",
    "head of a first message": f"{n(limits.OPENING_HEAD_BYTES / KIB)} KiB",
    "later heads": f"{n((limits.OPENING_HEAD_BYTES + limits.RULES_HEAD_BYTES) / KIB)} KiB + "
    f"{n(limits.TOKEN_HEAD_BYTES)} B per token and node + {n(limits.GUESS_HEAD_BYTES)} B per node, at most "
    f"{n(limits.MAX_HEAD_BYTES / MIB)} MiB",
    f"heads beyond {n(service.LARGE_HEAD_BYTES / KIB)} KiB": f"{n(RATES[admission.DECODED].per_key)} ms/s per address, "
    f"{n(RATES[admission.DECODED].burst / 1e3)} s at once",
    "rules of picks": f"{n(pick_rules.MAX_BIASES)} biases, {n(pick_rules.MAX_END_TOKENS)} ids that end a text, a "
    f"grammar of {n(pick_rules.MAX_GRAMMAR_BYTES / KIB)} KiB",
    "compiling a grammar": f"{lease_of(grammars.COMPILING)}, {n(grammars.GRAMMAR_BYTES / MIB)} MiB",
    "masks of a sweep": lease_of(grammars.MATCHING),
    "grammars that take more": f"{refusals(GRAMMARS.strikes).replace('refused', 'refused any')}, on the hop that he "
    f"speaks to; at the tail the machine that carries his session is, with the "
    f"{n((GRAMMARS.strikes.allowed + 1) * quota.NEAR_WEIGHT)}th",
    "processors for grammars": f"{n(GRAMMARS.rates[admission.MATCHED].per_key)} ms/s per address, "
    f"{n(GRAMMARS.rates[admission.MATCHED].burst / 1e3)} s at once; "
    f"{n(GRAMMARS.rates[admission.MATCHED].total / 1e3)} s/s and "
    f"{n(GRAMMARS.rates[admission.MATCHED].total_burst / 1e3)} s for all; workers make way for the engine "
    f"(nice {grammars.NICENESS})",
    "grammars that are followed": f"{n(grammars.MAX_LIVE)}, and {n(grammars.LIVE_BYTES / MIB)} MiB of them",
    "compiled grammars that are kept": f"{n(grammars.MAX_COMPILED)}, the latest, and "
    f"{n(grammars.KEPT_BYTES / MIB)} MiB",
    "a tokenizer that grammars need": f"{lease_of(grammars.READING)}, {n(grammars.TOKENIZER_BYTES / GIB)} GiB",
    "log-probabilities": f"{n(pick_rules.MAX_TOP_LOG_PROBS)} tokens per pick",
    "hidden rows of a prompt": f"{n(limits.MAX_PROMPT_ROWS)} per sweep; {n(limits.PROMPT_ROWS_BYTES / MIB)} MiB",
    "refusals with a signature": f"{rate(admission.SIGNED)}, per address; {n(RATES[admission.SIGNED].total)}/s in all",
    "asking for what is refused": f"{rate(admission.INSISTED)}; more counts as garbage",
    "garbage": f"after {STRIKES.allowed}, the address is {refusals(STRIKES)}",
    "new successors of a session": f"{n(RATES[admission.SUCCESSORS].burst)}, then "
    f"{n(RATES[admission.SUCCESSORS].per_key * 60)} a minute",
    "new successors of an address": f"{n(RATES[admission.DIALLED].burst)}, then "
    f"{n(RATES[admission.DIALLED].per_key)} a second",
    "streams of a session that are opened or left": n(successor.MAX_OPEN),
    "circuits of one relay at a node": f"{n(circuits.MAX_CIRCUITS)} at a time, "
    f"{n(circuits._LIMITS.rates[circuits._OPENED].per_key)}/s",
    "calls and holes that a relay asks for": f"one per {n(1 / standing._LIMITS.rates[standing._ASKED].per_key)} s, "
    f"{n(standing._LIMITS.rates[standing._ASKED].burst)} at once",
    "log lines of refusals": f"one a minute and address, {n(logs.MAX_KEYS + 1)} in all",
    "announcements of the local network": f"{n(lan.MAX_SERVICES)} are read, within {n(lan.BROWSE_S)} s; "
    f"{n(lan.MAX_JOIN)} addresses each",
    "keys that are remembered": n(quota.MAX_KEYS),
    "questions to a peer of the directory; items stored there": "; ".join(
        f"{n(one.per_key)}/s, {n(one.burst)} at once"
        for one in (directory._LIMITS.rates[directory._FIND], directory._LIMITS.rates[directory._STORE])
    ),
}
_OFFERS = relay_offers._LIMITS.rates[relay_offers._QUESTIONS]
AT_A_RELAY = {
    "new connections": f"{n(RELAY.new.per_key)}/s, {n(RELAY.new.burst)} at once; {n(RELAY.new.total)}/s of all",
    "connections": f"{n(RELAY.connections.per_key)} of an address, {n(RELAY.connections.total)} in all",
    "openings under way": f"{n(RELAY.openings.per_key)}, {n(RELAY.openings.total)} in all; the slowest goes",
    "opening; proof; headers": f"{n(streams.MAX_LINE_BYTES)} B; {n(openings.MAX_PROOF_BYTES / KIB)} KiB; "
    f"{n(openings.MAX_HEADER_BYTES / KIB)} KiB",
    "machines that stand here": f"{n(RELAY.names.per_key)} of an address, {n(RELAY.names.total)} in all",
    "silence of a machine": f"{n(openings.DEAD_S)} s; pinged every {n(openings.PING_S)} s",
    "lines that wait for a machine; that it says": f"{n(server.MAX_UNSAID)}; {n(server.MAX_HEARD)} per ping",
    "circuits": f"{n(RELAY.circuits.per_key)} of an address, {n(RELAY.machine_circuits)} to a machine, "
    f"{n(RELAY.circuits.total)} in all",
    "a circuit's buffer": f"what the rate carries in {n(server.CHUNK_S * 1e3)} ms, "
    f"{n(server.MIN_CHUNK_BYTES / KIB)} to {n(server.CHUNK_BYTES / KIB)} KiB each way",
    "a circuit that carries nothing": f"{n(RELAY.idle_s)} s",
    "time to take a circuit; its token": f"{n(openings.TAKE_S)} s; {n(8 * openings.TOKEN_BYTES)} bits, once",
    "what a machine is told to open or call": f"{n(RELAY.summons.per_key)}/s, {n(RELAY.summons.burst)} at once; by one "
    f"address {n(RELAY.own_summons.per_key)}/s, {n(RELAY.own_summons.burst)} at once",
    "circuit of a PUNCH": f"{n(openings.MEETING_S)} s and {n(openings.MEETING_BYTES / KIB)} KiB",
    "SEEN": f"{n(RELAY.seen.per_key)} held of an address, {n(RELAY.seen.total)} in all; {n(openings.SEEN_S)} s",
    "WHO": f"1 in {n(1 / RELAY.proofs.per_key)} s, {n(RELAY.proofs.burst)} at once; {n(RELAY.proofs.total)}/s of all",
    "bytes": f"{n(server.BURST_S)} s of it at once",
    "questions to a DHT peer whether it lends": f"1 in {n(1 / _OFFERS.per_key)} s, {n(_OFFERS.burst)} at once; "
    f"{n(_OFFERS.total)}/s of all",
    "dial-backs: of a node; of a relay; of a peer's own directory address": f"{n(dialback._MAX_PER_PEER)} a minute of "
    f"a peer each, {n(dialback._MAX_REQUESTS)} of all, {n(dialback._MAX_RUNNING)} at a time; "
    f"{n(dialback.DEADLINE_S)} s",
}
_HOLES = punch._LIMITS.rates[punch._PUNCHES]
PAST_A_RELAY = {
    "holes that a machine tries": f"{n(punch.MAX_AT_A_TIME)} at a time; {n(_HOLES.burst)} at once and one in "
    f"{n(1 / _HOLES.per_key)} s per relay; {n(_HOLES.total_burst)} and {n(_HOLES.total)}/s in all",
    "addresses of a hole": f"{n(openings.MAX_ADDRESSES)}, ports from {hole.MIN_PORT}",
    "knocking": f"{n(hole.MEET_S)} s, every {n(hole.FIRST_PAUSE_S)} s to {n(hole.LONGEST_PAUSE_S)} s",
    "connections greeted at a hole": f"{n(hole.MAX_GREETED)} at a time, {n(hole.GREETING_S)} s each",
    "agreeing; the relay's view": f"{n(punching.AGREE_S)} s; {n(hole.SEEN_S)} s",
    "calls that a node waits for": f"{n(call_back.MAX_EXPECTED)}, {n(call_back.CALLED_S)} s each; none after "
    f"{n(call_back.MAX_IN_VAIN)} in vain",
    "openings at its port": f"{n(call_back.MAX_OPENINGS)} at a time, {n(openings.OPENING_S)} s each",
    "peers tried at a time": n(local_dialler.MAX_ATTEMPTS),
    "head start of a better way": f"{n(local_dialler.HEAD_START_S)} s; {n(local_dialler.KNOWN_S)} s where one worked",
    "a failed way": f"{n(way.REMEMBERED_S / 60)} min; {n(way.SOON_S)} s without a real attempt; "
    f"{n(local_dialler.MAX_PEERS)} peers are remembered",
    "local sockets": f"{n(local_dialler.MAX_DOORS)}, {n(local_dialler.MAX_CARRIED)} connections each",
}
JOINING = {
    "addresses of a command; of CANOPY_JOIN": n(resolve.MAX_JOIN),
    "remembered": f"{n(remembered.MAX_SWARMS)} swarms; {n(remembered.MAX_PEERS)} addresses of others, "
    f"{n(remembered.MAX_HERE)} of this machine in each; {n(remembered.MAX_FILE_BYTES / KIB)} KiB",
    "which swarm peers are of": f"{n(about.ASK_S)} s, {n(process.OTHERS_S)} s after the first",
    "announcements of a local network": f"{n(lan.MAX_SERVICES)}, {n(lan.MAX_JOIN)} addresses each; {n(lan.BROWSE_S)} s",
    "proof of a peer at its address": f"{n(peer_proof.PROVE_S)} s, {n(peer_proof.MAX_PROVEN)} at once; a certificate "
    f"of {n(peer_proof._MAX_CERTIFICATE / KIB)} KiB",
    "an invite": f"{n(command.PEERS_INVITED)} addresses are written, of each peer one per family, and "
    f"{n(invite.MAX_PEERS)} are read; {n(invite.MAX_CHARACTERS)} characters, {n(invite.MAX_DAYS)} days",
    "a peer's host name that does not lead to it": f"looked up again for {n(addresses.LOOK_UP_S)} s",
    "answers about swarms of the local network": f"{n(lan_choice.MAX_ANSWERS)}, the newest; "
    f"{n(lan_choice.MAX_FILE_BYTES / KIB)} KiB",
}
CHECKPOINT = {
    "rendering a chat template": f"{lease_of(rendering.RENDERING)}, {n(rendering.RENDERING_BYTES / MIB)} MiB",
    "trying a tokenizer": f"{n(tokenizer_trial.LOADING.cpu_s)} s of a processor and "
    f"{n(tokenizer_trial.LOADING.wall_s)} s in all to load it, {n(tokenizer_trial.ENCODING.cpu_s)} s and "
    f"{n(tokenizer_trial.ENCODING.wall_s)} s to encode a line; {n(tokenizer_trial.TRIAL_BYTES / GIB)} GiB",
}
SECTIONS = {
    "# What one peer may cost a node": NODE,
    "## What one peer may cost a relay": AT_A_RELAY,
    "## Ways past a relay": PAST_A_RELAY,
    "## Joining": JOINING,
    "## What a checkpoint may cost whoever reads it": CHECKPOINT,
}


def rows(heading: str) -> dict[str, str]:
    """The first two columns of a section's table."""
    section = PAGE.read_text(encoding="utf-8").partition(f"{heading}\n")[2].partition("\n## ")[0]
    cells = [line.split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return {name.removeprefix("| "): value for name, value, *_ in cells}


@pytest.mark.parametrize("heading", SECTIONS)
def test_numbers_are_those_of_the_code(heading: str) -> None:
    written = rows(heading)
    for name, value in SECTIONS[heading].items():
        assert re.search(rf"(?<![\d.,]){re.escape(value)}(?!\d|,\d)", written[name]), f"{name}: {value}"


def test_what_an_address_is_stands_as_the_quota_counts_it() -> None:
    head = " ".join(PAGE.read_text(encoding="utf-8").partition("\n| ")[0].split())
    assert f"the /{quota.IPV6_HOME} of an IPv6 address" in head
    assert f"{2 ** (quota.IPV6_LINK - quota.IPV6_HOME)} links of a /{quota.IPV6_LINK}" in head
    assert f"a loopback address in {quota.STAND_INS}" in head
    assert f"have {quota.NEAR_WEIGHT} times as much" in head
    assert f"an IPv4 /{quota.IPV4_SITE}, an IPv6 /{quota.IPV6_SITE}: 256 addresses of either" in head
    assert quota.IPV6_HOME - quota.IPV6_SITE == 32 - quota.IPV4_SITE == 8
