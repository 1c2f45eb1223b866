"""The attacker's process: prepares one attack, strikes and stops on orders from standard input, and tells what it cost.

python -m benchmarks.redteam.attacker NAME GROUND_AS_JSON

Each line of standard input is an order: `prepare` with the honest nodes' records in hex, `go`, `stop`. Each line of
standard output is JSON: that it is ready, or what the attack cost.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import traceback
from contextlib import suppress
from dataclasses import asdict

import psutil

from benchmarks.redteam.attack import Attack, Fight
from benchmarks.redteam.ground import Ground, Tally
from benchmarks.redteam.kit import Kit
from benchmarks.redteam.listing import find_attack

NICE = 19
STOP_S = 4.0


def say(**news: object) -> None:
    sys.stdout.write(json.dumps(news) + "\n")
    sys.stdout.flush()


async def fight_once(attack: Attack, fight: Fight) -> str:
    """Carry out one run; what went wrong with the attacker itself, or nothing."""
    try:
        await attack.act(fight)
    except asyncio.CancelledError:
        raise
    except BaseException:  # noqa: BLE001 (an attack that could not act must not look like one that was held)
        return traceback.format_exc(limit=-3)
    finally:
        fight.be_ready()  # one that ended before it began is over all the same
    return ""


async def serve(attack: Attack, ground: Ground) -> None:
    orders = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    async with asyncio.TaskGroup() as group:
        while line := (await orders.readline()).split():
            tally = Tally()
            async with Kit(ground, tally) as kit:
                fight = Fight(ground, kit, tuple(bytes.fromhex(one.decode()) for one in line[1:]), lambda: say(ready=1))
                running = group.create_task(fight_once(attack, fight))
                await orders.readline()  # go
                spent = _processor_s()
                fight.started.set()
                await orders.readline()  # stop
                spent = _processor_s() - spent
                while not running.done():  # what ends a connection may swallow one cancellation
                    running.cancel()
                    await asyncio.wait({running}, timeout=STOP_S)
                trouble = "" if running.cancelled() else running.result()
            say(over=asdict(tally), processor_s=spent, trouble=trouble)


def _processor_s() -> float:
    """Of this process and its descendants, those that have not ended yet included."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    total = sum(one.ru_utime + one.ru_stime for one in used)
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            total += sum(child.cpu_times()[:4])
    return total


def main() -> None:
    os.nice(NICE)  # what is measured is the swarm, and not who gets the processor
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with suppress(KeyboardInterrupt):
        asyncio.run(serve(find_attack(sys.argv[1]), Ground.from_json(json.loads(sys.argv[2]))))


if __name__ == "__main__":
    main()
