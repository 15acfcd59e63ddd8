"""The Trainer of Lightning."""

import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from gossipdp.integrations import needed_from
from gossipdp.launcher.environment import Environment
from gossipdp.parallel.module import GossipDataParallel
from gossipdp.parallel.stats import Consolidated

with needed_from("lightning"):
    from lightning.pytorch.strategies import SingleDeviceStrategy
    from lightning.pytorch.utilities import rank_zero_only


class GossipStrategy(SingleDeviceStrategy):
    """Makes a Trainer train with the other workers: ``Trainer(strategy=GossipStrategy())``.

    The module and its optimizers are wrapped when ``fit`` begins to train, and consolidated when
    it ends: then all workers' modules are the same average. With ``budget_samples`` training ends
    when all workers together have seen as many; ``max_steps`` and ``max_epochs`` limit each
    worker by itself.

    To Lightning this is a run on one device whose ``global_rank`` is the worker's: worker 0 alone
    logs, saves checkpoints and shows progress. Make the Trainer within ``single_process()``.

    Args:
        device: of the parameters.
        options: of :class:`~gossipdp.GossipDataParallel`.

    Attributes:
        consolidated: how the last ``fit`` ended; None until then.
    """

    strategy_name = "gossipdp"

    def __init__(self, device: str | torch.device = "cpu", **options: Any) -> None:
        super().__init__(device=device)
        environment = Environment.read()
        self.global_rank = rank_zero_only.rank = environment.rank
        self.local_rank = environment.local_rank
        self.consolidated: Consolidated | None = None
        self._options = options
        self._gossip: GossipDataParallel | None = None
        self._users_sigterm: Any = None

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    @property
    def gossip(self) -> GossipDataParallel:
        """Return the wrapper, for its ``stats()``, ``averaged()`` and so on.

        Raises:
            RuntimeError: training has not begun.
        """
        if self._gossip is None:
            raise RuntimeError("there is no model yet: Trainer.fit() makes it")
        return self._gossip

    def progress(self) -> float:
        """Return the progress of the whole run for a scheduler; 0 before training begins."""
        return 0.0 if self._gossip is None else self._gossip.progress()

    def setup_environment(self) -> None:
        """Note the handler of SIGTERM before Lightning sets its own."""
        self._users_sigterm = signal.getsignal(signal.SIGTERM)
        super().setup_environment()

    def on_train_start(self) -> None:
        """Wrap the module and the optimizers; wait for the other workers."""
        super().on_train_start()
        assert self.lightning_module is not None
        # Lightning's handler would end the process with status 0, as if it were done, and without a
        # last checkpoint. When training has ended, Lightning puts back the handler that it found.
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and self._users_sigterm == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._gossip = GossipDataParallel(self.lightning_module, self.optimizers, **self._options)
        # One that joins a run is given its rank here.
        self.global_rank = rank_zero_only.rank = self._gossip.rank

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's ``training_step``, count its batch and log its loss."""
        self.gossip.count_batch(args[0] if args else kwargs)
        result = super().training_step(*args, **kwargs)
        loss = result.get("loss") if isinstance(result, Mapping) else result
        # In manual optimization a step may return whatever it likes.
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self.gossip.log(loss=loss.detach())
        assert self.lightning_module is not None
        if not self.lightning_module.automatic_optimization:
            self._stop_if_finished()  # it may have stepped an optimizer that Lightning has not seen
        return result

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step the optimizer; end training if the budget is used up."""
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._stop_if_finished()
        return result

    def _stop_if_finished(self) -> None:
        if self.gossip.finished:
            assert self.lightning_module is not None
            self.lightning_module.trainer.should_stop = True

    def on_train_end(self) -> None:
        """Wait for the other workers, and give the module the average of all."""
        self.consolidated = self.gossip.consolidate()
        super().on_train_end()

    def teardown(self) -> None:
        """Stop taking part, however the training ended."""
        if self._gossip is not None:
            self._gossip.close()
        super().teardown()
