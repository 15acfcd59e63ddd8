"""The Trainer of Hugging Face transformers."""

from typing import Any

import torch
from torch import nn

from gossipdp.integrations import needed_from
from gossipdp.integrations.accelerate import torch_optimizer
from gossipdp.parallel.counted_batches import arguments
from gossipdp.parallel.module import GossipDataParallel
from gossipdp.parallel.stats import Consolidated

with needed_from("transformers"):
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_utils import SaveStrategy
    from transformers.training_args import ParallelMode


class GossipCallback(TrainerCallback):
    """Makes a Trainer train with the other workers: ``Trainer(callbacks=[GossipCallback()])``.

    The model and its optimizer are wrapped when training begins, and consolidated when it ends:
    then all workers' models are the same average. With ``budget_samples`` training ends when all
    workers together have seen as many; ``max_steps`` and epochs limit each worker by itself.

    On all workers but the first it turns saving off and tells the Trainer's state that it is not
    the first process, so that one alone logs and shows progress.

    Make the TrainingArguments within ``single_process()``.

    Args:
        options: of :class:`~gossipdp.GossipDataParallel`.

    Attributes:
        consolidated: how the run ended; None until then.

    Raises:
        ValueError: at the start of training: the Trainer is of several processes or GPUs, or would
            load a checkpoint of its own at the end.
    """

    def __init__(self, **options: Any) -> None:
        self.consolidated: Consolidated | None = None
        self._options = options
        self._model: GossipDataParallel | None = None

    @property
    def model(self) -> GossipDataParallel:
        """Return the wrapper, for its ``stats()``, ``averaged()`` and so on.

        Raises:
            RuntimeError: training has not begun.
        """
        if self._model is None:
            raise RuntimeError("there is no model yet: Trainer.train() makes it")
        return self._model

    def progress(self) -> float:
        """Return the progress of the whole run for a scheduler; 0 before training begins."""
        return 0.0 if self._model is None else self._model.progress()

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        **others: Any,
    ) -> None:
        """Wrap the model and the optimizer; wait for the other workers."""
        _check(args)
        self._leave()  # an exception may have ended the training before: there is no hook for that
        self._model = wrapped = GossipDataParallel(
            model, torch_optimizer(optimizer), **self._options
        )

        def count(module: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
            # A copy of the model brings this hook along.
            if module is model and module.training and torch.is_grad_enabled():
                wrapped.count_batch(arguments(positional, named))

        self._counting = model.register_forward_pre_hook(count, with_kwargs=True)
        if wrapped.rank > 0:
            args.save_strategy = SaveStrategy.NO
            state.is_world_process_zero = state.is_local_process_zero = False

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """End training if the budget is used up."""
        if self.model.finished:
            control.should_training_stop = True

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **others: Any,
    ) -> None:
        """Put the loss that the Trainer reports into the run's log; every ``logging_steps``."""
        if self._model is not None and logs is not None and "loss" in logs:
            self._model.log(loss=float(logs["loss"]))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Wait for the other workers, and give the model the average of all."""
        self.consolidated = self.model.consolidate()
        self._leave()

    def _leave(self) -> None:
        """Stop taking part and counting; the wrapper still has its ``stats()``."""
        if self._model is not None:
            self._counting.remove()
            self._model.close()


def _check(args: TrainingArguments) -> None:
    if args.parallel_mode == ParallelMode.DISTRIBUTED:
        raise ValueError(
            f"the Trainer itself has started torch.distributed with {args.world_size} processes: "
            "make its TrainingArguments within `with single_process():`"
        )
    if args.parallel_mode != ParallelMode.NOT_PARALLEL:
        raise ValueError(
            f"the Trainer itself uses {args.n_gpu} GPUs in this process: let each worker see one, "
            "by CUDA_VISIBLE_DEVICES"
        )
    if args.load_best_model_at_end:
        raise ValueError(
            "load_best_model_at_end=True would put one worker's old parameters in place of the "
            "average: leave it False"
        )
