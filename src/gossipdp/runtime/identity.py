"""Who a worker is and what it runs: the values that a handshake compares and carries."""

import dataclasses

import msgspec

# What both ends must have alike, in the order in which a difference is reported.
AGREED_FIELDS = ("run_id", "model", "method", "graph", "comm_rate", "wire_format")

MAX_TEXT = 200

# Ranks from here on are of visitors: processes that only ask who takes part, before they join. They
# draw one at random, and may not know the graph yet.
FIRST_VISITOR_RANK = 2**30
MAX_RANK = 2**31 - 1


class Identity(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A worker's hello.

    ``rank``, ``incarnation`` and ``process_id`` say who; ``host`` (a numeric address) and ``port``
    where it listens; the remaining fields what it runs, each a short string that a refusal can
    show: ``model`` the fingerprint of names, shapes and order, ``graph`` a digest.

    ``incarnation`` is the one with which the process began, and stays when the process goes on as
    a new life after it was taken for dead: it orders processes of one rank, of which a later one
    begins above all that is known of the earlier. Which life stands is for membership to say, over
    links. A hello that followed would shut out the one that must give way before it was told so.
    """

    rank: int
    incarnation: int
    process_id: int
    run_id: str
    model: str
    method: str
    graph: str
    comm_rate: str
    wire_format: str
    host: str = ""
    port: int = 0

    def __post_init__(self) -> None:
        """Check every field; msgspec turns the ValueError into its ValidationError."""
        for name, bound in (("rank", MAX_RANK + 1), ("incarnation", 2**32), ("process_id", 2**63)):
            value = getattr(self, name)
            if not 0 <= value < bound:
                raise ValueError(f"{name} {value} is not in 0..{bound - 1}")
        if not 0 <= self.port < 65536:
            raise ValueError(f"port {self.port} is not in 0..65535")
        for name in (*AGREED_FIELDS, "host"):
            if len(getattr(self, name)) > MAX_TEXT:
                raise ValueError(f"{name} is longer than {MAX_TEXT} characters")

    @property
    def is_visitor(self) -> bool:
        """Whether this process only asks who takes part."""
        return self.rank >= FIRST_VISITOR_RANK

    def disagreement(self, other: "Identity") -> "Refusal | None":
        """The first field in which the two workers' runs differ, seen from ``self``."""
        for name in AGREED_FIELDS:
            if name == "graph" and (self.is_visitor or other.is_visitor):
                continue
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                return Refusal(name, ours, theirs)
        return None


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why one worker turned another away: ``field`` differs; ``ours`` is the refuser's value.

    ``str()`` of it is the text for :class:`~gossipdp.errors.RefusedError`.
    """

    field: str
    ours: str
    theirs: str

    def __str__(self) -> str:
        """A sentence for the user of the refused worker."""
        match self.field:
            case "secret":
                return (
                    "the secrets differ; give all workers of a run the same GOSSIPDP_SECRET, "
                    "or start them with one launcher"
                )
            case "tls":
                return (
                    f"TLS is {self.ours} at the other worker and {self.theirs} here; give all "
                    "workers tls_cert, tls_key and tls_ca, or none"
                )
            case "rank":
                return f"the worker at that address has rank {self.ours}, not {self.theirs}"
            case "own_rank":
                return f"both workers claim rank {self.ours}; every worker needs its own RANK"
            case "incarnation":
                return (
                    f"a newer incarnation ({self.ours}) of this worker is connected; "
                    f"this one is {self.theirs}"
                )
        label = self.field.replace("_", " ")
        return f"{label} differs: the other worker has {self.ours!r}, this one {self.theirs!r}"
