"""`flotilla plan`: what a spec would start, where, and for how much; nothing is started."""

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from services.common.config import canonical_json, load_spec
from services.common.errors import ConfigError
from services.launcher import preflight
from services.launcher.plan import BadSpecError, Plan, log_path, read_spec
from services.launcher.ports import BackendError, Launch, Offer
from services.launcher.runs import ROLLOUT, SERVICES, Key
from services.launcher.sky import names, offers, tasks
from services.launcher.sky.code import FOLDER
from services.launcher.sky.prices import Catalog
from services.launcher.sky.whole import whole_run

OK, BAD_SPEC = 0, 2
_SKY_HOME = Path("~/.sky")
_GENERATED = "# Generated: flotilla plan {spec}{flag} --out {folder}\n"


def plan(
    path: Path, runs: Path, overrides: Sequence[str], out: Path | None, *, one_machine: bool
) -> int:
    """Print the plan; its files go to `out`, or to the terminal too."""
    try:
        spec = load_spec(path, overrides)
        read = read_spec(canonical_json(spec))
        asyncio.run(preflight.check(read))
        texts = _one_machine(path, spec, read) if one_machine else _services(read, runs)
    except (ConfigError, BadSpecError, BackendError) as error:
        print(f"error: {error}")
        return BAD_SPEC
    flag = " --one-machine" if one_machine else ""
    for name, text in texts.items():
        if out is None:
            print(f"\n# {name}\n{text}", end="")
            continue
        out.mkdir(parents=True, exist_ok=True)
        head = _GENERATED.format(spec=path, flag=flag, folder=out)
        (out / name).write_text(f"{head}{text}", encoding="utf-8")
        print(f"wrote {out / name}")
    return OK


def _one_machine(path: Path, spec: dict[str, Any], read: Plan) -> dict[str, str]:
    machines = read.config.sky.learner
    price = Catalog(_SKY_HOME.expanduser()).cheapest(machines)
    shown = ", or ".join(tasks.describe(machine) for machine in machines.candidates)
    print(f"{read.name}: all services on one machine: {shown}; {_dollars(price)}")
    document = whole_run(str(path), spec, read.config)
    return {f"{read.name}.yaml": offers.dump([document])}


def _services(read: Plan, runs: Path) -> dict[str, str]:
    """Print services, replicas, candidates and prices; return the files by name."""
    offerer = offers.Offerer(names.owner_of(runs), Catalog(_SKY_HOME.expanduser()))
    shape = read.config.replicas()
    found = {service: _offer(offerer, read, runs, (service, 0)) for service in SERVICES}
    _print_table(read, found)
    for warning in offers.warnings(read.config):
        print(f"warning: {warning}")
    if read.config.backend != "sky":
        print(
            'note: launcher.backend is "local": flotilla train starts this on this machine;'
            " --launcher.backend=sky starts it on those"
        )
    first = _launch(read, runs, (SERVICES[0], 0))
    site = offerer.site(first, runs / read.name / FOLDER)
    if read.config.sky.mode == "cluster":
        keys: Iterable[Key] = ((s, index) for s in SERVICES for index in range(shape[s]))
        return {f"{_file(read, key)}": offers.dump([tasks.task(site, key)]) for key in keys}
    group = offers.dump(tasks.group(site, offers.static_keys(read.config)))
    members = [(ROLLOUT, index) for index in range(shape[ROLLOUT])]
    texts = {_file(read, key): offers.dump([tasks.task(site, key)]) for key in members}
    return {f"{read.name}-group.yaml": group, **texts}


def _file(read: Plan, key: Key) -> str:
    return f"{read.name}-{key[0]}-{key[1]}.yaml"


def _launch(read: Plan, runs: Path, key: Key) -> Launch:
    return Launch(
        run_id=read.name,
        key=key,
        command=(),
        secrets={},
        log=log_path(runs / read.name, key),
        spec_json=read.text,
        config=read.config,
    )


def _offer(offerer: offers.Offerer, read: Plan, runs: Path, key: Key) -> Offer:
    return offerer.offer(_launch(read, runs, key), runs / read.name / FOLDER)


def _print_table(read: Plan, found: dict[str, Offer]) -> None:
    sky, total, unknown = read.config.sky, 0.0, False
    kind = "one managed Job Group" if sky.mode == "group" else "a cluster per replica"
    print(f"{read.name}: {kind}; network {sky.network}")
    for service, count in read.config.replicas().items():
        offer = found[service]
        print(f"  {service} x {count}: {offer.resources}")
        print(f"    {_dollars(offer.dollars_per_hour)} per replica")
        total += count * (offer.dollars_per_hour or 0.0)
        unknown = unknown or offer.dollars_per_hour is None
    print(f"  in total: {_dollars(total)}{' and what is not known' if unknown else ''}")


def _dollars(price: float | None) -> str:
    return "price not known" if price is None else f"${price:.2f}/h"
