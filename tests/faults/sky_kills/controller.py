"""SkyPilot's own work: it gives machines to jobs, watches them, recovers them and tidies up.

Pure bookkeeping but for the cloud; called often, under the server's lock.
"""

import time
from collections.abc import Iterable

from tests.faults.sky_kills.machines import Cloud
from tests.faults.sky_kills.state import Cluster, Document, Machine, ManagedTask, Script, State


class Controller:
    """The controllers of all managed jobs, and what looks after plain clusters."""

    def __init__(self, state: State, cloud: Cloud) -> None:
        self.state = state
        self.script = Script()
        self._cloud = cloud

    def turn(self) -> None:
        """Take each job one step further."""
        for name, machine in self.state.machines.items():
            machine.code = self._cloud.look(name, machine)
        for task in [task for task in self.state.tasks if not task.over]:
            self._advance(task)
        for cluster in self.state.clusters.values():
            self._look_after(cluster)
        self._end_groups()

    def _advance(self, task: ManagedTask) -> None:
        passed = time.time() - task.since
        match task.status:
            case "PENDING" if task.submitted_at is None:
                task.becomes("STARTING")
                task.submitted_at = task.since
                if not self.request_machine(task.task, task.document):
                    task.becomes("PENDING")
                else:
                    self._cluster(task)
            case "STARTING" if passed >= self.script.boot_s:
                self._booted(task)
            case "RUNNING" if task.ready:
                self._watch(task)
            case "RUNNING" if passed >= self.script.setup_s:
                self._set_up(task)
            case "RECOVERING" if self.script.recovers and passed >= self.script.boot_s:
                self._cluster(task)
                self._booted(task)
            case "CANCELLING" if passed >= self.script.cancel_s:
                self.terminate(task.cluster)
                task.becomes("CANCELLED")
            case _:
                return

    def request_machine(self, replica: str, document: Document) -> bool:
        """Return whether there is a machine for a replica now."""
        count = self.state.requests.get(replica, 0) + 1
        self.state.requests[replica] = count
        self.state.infras.setdefault(replica, []).append(infra_of(document))
        return count > self.script.sold_out

    def _cluster(self, task: ManagedTask) -> None:
        self.provision(Cluster(task.cluster, task.document, managed=True))

    def provision(self, cluster: Cluster) -> None:
        """Have the cloud boot a machine: from now on it costs money."""
        state = self.state
        state.clusters[cluster.name] = cluster
        state.machines[cluster.name] = Machine(time.time())
        replica = cluster.document["name"]
        now = sum(c.document["name"] == replica for c in state.clusters.values())
        state.most[replica] = max(now, state.most.get(replica, 0))

    def _booted(self, task: ManagedTask) -> None:
        """SkyPilot calls a job running as soon as it has a machine, which is being set up then."""
        task.becomes("RUNNING")
        task.start_at, task.ready = task.since, False

    def _set_up(self, task: ManagedTask) -> None:
        cluster = self.state.clusters.get(task.cluster)
        if cluster is None or task.cluster not in self.state.machines:
            task.becomes("RECOVERING")
        elif self.script.setup_fails:
            self.terminate(task.cluster)
            task.becomes("FAILED_SETUP", "setup exited with code 7")
        else:
            self.run(cluster)
            task.ready = True

    def run(self, cluster: Cluster) -> None:
        """Start the task's program on its cluster's machine."""
        cluster.status = "UP"
        if not self.script.bare:
            self.state.machines[cluster.name] = self._cloud.boot(cluster.name, cluster.document)

    def _watch(self, task: ManagedTask) -> None:
        machine = self.state.machines.get(task.cluster)
        recovery = task.document["resources"].get("job_recovery", {})
        wanted = recovery.get("recover_on_exit_codes", [])
        if machine is None or machine.code in wanted:
            self.terminate(task.cluster)
            task.recoveries += 1
            task.becomes("RECOVERING")
        elif machine.code is not None:
            self.terminate(task.cluster)
            status = "FAILED" if machine.code else "SUCCEEDED"
            task.becomes(
                status, f"Job exited with exit code {machine.code}" if machine.code else ""
            )

    def _look_after(self, cluster: Cluster) -> None:
        machine = self.state.machines.get(cluster.name)
        if not cluster.managed and machine is not None and machine.code is not None:
            cluster.job = "FAILED" if machine.code else "SUCCEEDED"

    def _end_groups(self) -> None:
        """Cancel the other tasks of a group once all its primary tasks have ended."""
        for root in {task.root for task in self.state.tasks}:
            members = [task for task in self.state.tasks if task.root == root]
            if all(task.over for task in members if task.primary):
                self.cancel(members)

    def cancel(self, tasks: Iterable[ManagedTask]) -> None:
        for task in tasks:
            if not task.over and task.status != "CANCELLING":
                task.becomes("CANCELLING")

    def preempt(self, name: str, *, notice: bool) -> None:
        """Take a machine away, at once or after a notice to what runs on it."""
        machine = self.state.machines[name]
        if notice:
            self._cloud.signal(name, machine)
        else:
            self._cloud.terminate(name, machine)
            del self.state.machines[name]

    def leak(self, name: str) -> None:
        """A cluster of no job, as a server leaves that is killed while it starts one."""
        self.provision(Cluster(name, {"name": name}, managed=True))

    def terminate(self, name: str) -> None:
        machine = self.state.machines.pop(name, None)
        if machine is not None:
            self._cloud.terminate(name, machine)
        self.state.clusters.pop(name, None)


def infra_of(document: Document) -> str:
    """Return where a task's machine is: at its first candidate."""
    resources = document.get("resources", {})
    first = (resources.get("ordered") or resources.get("any_of") or [resources])[0]
    return first.get("infra", "")
