"""The configuration files of a box, as text."""

import shlex
from pathlib import Path

from tests.sky.box.layout import LOGIN, Layout

# A terminal is a device file that every machine has: Slurm wants one file per GPU.
_GPU_FILE = "/dev/tty{number}"


def slurm_conf(layout: Layout) -> str:
    base = layout.base
    lines = [
        f"ClusterName={layout.cluster}",
        f"SlurmctldHost={LOGIN}({layout.address(LOGIN)})",
        "SlurmctldPort=17000",
        f"SlurmUser={layout.user}",
        f"SlurmdUser={layout.user}",
        "AuthType=auth/munge",
        f"AuthInfo=socket={layout.run}/munge.sock",
        "CredType=cred/munge",
        f"StateSaveLocation={base}/state",
        f"SlurmdSpoolDir={base}/spool/%n",
        f"SlurmctldPidFile={layout.run}/slurmctld.pid",
        f"SlurmdPidFile={layout.run}/slurmd.%n.pid",
        f"SlurmctldLogFile={layout.log}/slurmctld.log",
        f"SlurmdLogFile={layout.log}/slurmd.%n.log",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "JobAcctGatherType=jobacct_gather/none",
        "AccountingStorageType=accounting_storage/none",
        "SwitchType=switch/none",
        "MpiDefault=none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU_Memory",
        "SchedulerParameters=sched_interval=1,batch_sched_delay=0,sched_min_interval=100000",
        "GresTypes=gpu",
        # A node that was killed serves again as soon as its daemon registers.
        "ReturnToService=2",
        "JobRequeue=0",
        "SlurmdParameters=config_overrides",
        "KillWait=5",
        "MinJobAge=30",
        "MailProg=/bin/true",
        # slurmctld reads this when it starts, not when it is reconfigured.
        f"PrologSlurmctld={layout.conf}/prolog.sh",
        *_nodes(layout),
        *_partitions(layout),
    ]
    return _text(lines)


def _nodes(layout: Layout) -> list[str]:
    lines: list[str] = []
    for number, node in enumerate(layout.nodes):
        gres = f" Gres=gpu:{layout.gpu}:{layout.gpus}" if number < layout.gpu_nodes else ""
        lines.append(
            f"NodeName={node} NodeHostname={node} NodeAddr={layout.address(node)} Port=17001"
            f" CPUs={layout.cpus} RealMemory={layout.memory_mb} State=UNKNOWN{gres}"
        )
    return lines


def _partitions(layout: Layout) -> list[str]:
    split = layout.gpu_nodes
    parts = {"gpu": layout.nodes[:split], "cpu": layout.nodes[split:]}
    return [
        f"PartitionName={name} Nodes={','.join(nodes)} MaxTime=4:00:00 State=UP"
        + (" Default=YES" if name == "cpu" else "")
        for name, nodes in parts.items()
        if nodes
    ]


def gres_conf(layout: Layout) -> str:
    lines: list[str] = []
    for number, node in enumerate(layout.nodes[: layout.gpu_nodes]):
        for index in range(layout.gpus):
            file = _GPU_FILE.format(number=number * layout.gpus + index + 1)
            lines.append(f"NodeName={node} Name=gpu Type={layout.gpu} File={file}")
    return _text(lines)


def hosts(layout: Layout) -> str:
    lines = [f"{layout.address(host)} {host}" for host in layout.hosts]
    return _text(["127.0.0.1 localhost", *lines])


def prolog(layout: Layout) -> str:
    """Puts uv where SkyPilot looks for it before it would download one."""
    return _text(
        [
            "#!/bin/bash",
            'case "$SLURM_JOB_NAME" in *[!A-Za-z0-9._-]*|"") exit 0;; esac',
            f"bin={layout.home}/.sky_clusters/$SLURM_JOB_NAME/.local/bin",
            f'/bin/mkdir -p "$bin" && /bin/ln -sf {layout.shim}/uv "$bin/uv"',
        ]
    )


def uv_shim(layout: Layout) -> str:
    """`uv venv .../skypilot-runtime` hard-links a finished one; the rest of uv stays offline."""
    return _text(
        [
            "#!/bin/bash",
            'if [ "$1" = venv ]; then for word in "$@"; do case "$word" in */skypilot-runtime)',
            # Hard links need source and target on one mount.
            f'  mkdir -p "$(dirname "$word")"; exec cp -al {layout.node_tmp}/.runtime "$word";;',
            "esac; done; fi",
            f"export UV_OFFLINE=1 UV_CACHE_DIR={layout.base}/uv-cache",
            "export UV_PYTHON_DOWNLOADS=never UV_LINK_MODE=hardlink",
            f'exec {layout.shim}/uv.real "$@"',
        ]
    )


SUDO_SHIM = '#!/bin/bash\nwhile [ "${1#-}" != "$1" ]; do shift; done\nexec "$@"\n'


def sshd_config(layout: Layout) -> str:
    return _text(
        [
            f"HostKey {layout.ssh}/host",
            f"AuthorizedKeysFile {layout.ssh}/client.pub",
            f"AllowUsers {layout.user}",
            "StrictModes no",
            "UsePAM no",
            "PasswordAuthentication no",
            "MaxSessions 200",
            "PrintMotd no",
            "PidFile none",
            "Subsystem sftp /usr/lib/openssh/sftp-server",
            f"SetEnv SLURM_CONF={layout.slurm_conf} PATH={layout.path}",
        ]
    )


def login(layout: Layout) -> str:
    """ProxyCommand: a server that speaks SSH on its standard input, inside the login host."""
    sshd = f"/usr/sbin/sshd -i -f {layout.ssh}/sshd_config -E {layout.log}/sshd.log"
    return _text(["#!/bin/bash", f"exec {shlex.join(enter(layout, LOGIN))} --root {sshd}"])


def profile(layout: Layout) -> str:
    return f"export PATH={layout.path} SLURM_CONF={layout.slurm_conf}\n"


def enter(layout: Layout, host: str) -> list[str]:
    """The start of an argv that runs the rest on this host, as its user unless `--root` follows."""
    namespace = f"/run/netns/{layout.namespace(host)}"
    # `ip netns exec` would mount another /sys, and slurmd dies of that.
    entering = ["nsenter", f"--net={namespace}", "unshare", "--mount", "--uts"]
    return [*entering, str(layout.conf / "host.sh"), host]


def host_script(layout: Layout, exposed: list[str]) -> str:
    """Return the commands of a host in its new namespaces, before it becomes the command."""
    become = f"setpriv --reuid={layout.user} --regid={layout.user} --init-groups"
    variables = f"HOME={layout.home} USER={layout.user} LOGNAME={layout.user}"
    return _text(
        [
            "#!/bin/bash",
            "set -e",
            "name=$1; shift",
            'hostname "$name"',
            "mount --make-rprivate /",
            f"mount --bind {layout.conf}/hosts /etc/hosts",
            f'mount --bind {layout.base}/tmp-of/"$name" {layout.node_tmp}',
            *exposed,
            f"export SLURM_CONF={layout.slurm_conf} PATH={layout.path}",
            'if [ "$1" = --root ]; then shift; exec "$@"; fi',
            f'exec {become} env {variables} "$@"',
        ]
    )


def ssh_client_config(layout: Layout) -> str:
    return _text(
        [
            f"Host {layout.cluster}",
            f"  HostName {layout.address(LOGIN)}",
            f"  User {layout.user}",
            f"  IdentityFile {layout.ssh}/client",
            "  IdentitiesOnly yes",
            f"  ProxyCommand {layout.ssh}/login.sh",
        ]
    )


def expose(paths: list[Path], stage: Path) -> list[str]:
    """Shell lines that make paths below private folders reachable for all users, on this host.

    The private folder is covered by an empty one with only these paths in it.
    """
    lines: list[str] = []
    below: dict[Path, list[Path]] = {}
    for path in paths:
        if (folder := _private_folder(path)) is not None:
            below.setdefault(folder, []).append(path)
    for folder, inside in below.items():
        lines += [f"mount --bind {folder} {stage}", f"mount -t tmpfs -o mode=755 tmpfs {folder}"]
        for path in inside:
            kept = stage / path.relative_to(folder)
            lines += [f"mkdir -p {path}", f"mount --bind {kept} {path}"]
        lines.append(f"umount {stage}")
    return lines


def _private_folder(path: Path) -> Path | None:
    """The outermost folder above `path` that others may not enter."""
    private = [folder for folder in path.parents if not folder.stat().st_mode & 0o001]
    return private[-1] if private else None


def _text(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"
