"""Fair shares of one resource between tenants.

Start-time fair queueing (Goyal, Vin and Cheng, 1996): a tenant's next order begins at the end of
its last one in virtual time, or now if it had none, and the earliest begin is taken first. Tenants
that always want more get equal costs; one that paused has saved nothing up."""

from collections.abc import Iterable


class FairShare:
    """Virtual time of each tenant, in the unit of the costs."""

    def __init__(self) -> None:
        self._ends: dict[str, float] = {}
        self._now = 0.0

    def choose_next(self, tenants: Iterable[str]) -> str:
        """Return whose turn it is among the tenants that wait."""
        return min(tenants, key=lambda tenant: (self._begin(tenant), tenant))

    def charge(self, tenant: str, cost: float) -> None:
        """Take the tenant's turn."""
        self._now = max(self._now, self._begin(tenant))
        self._ends[tenant] = self._begin(tenant) + cost
        if len(self._ends) > 1024:
            self._ends = {name: end for name, end in self._ends.items() if end > self._now}

    def _begin(self, tenant: str) -> float:
        return max(self._now, self._ends.get(tenant, 0.0))
