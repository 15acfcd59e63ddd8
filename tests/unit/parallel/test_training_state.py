"""The optimizers' state: given between two steps, taken over bitwise, and never poisoned."""

import math
import threading
import time
from unittest.mock import Mock

import pytest
import torch
from bitwise import assert_bitwise, there_and_back
from calling_back import CallingLock
from torch import nn
from waiting import wait_until

from gossipdp.dynamics.device import Device
from gossipdp.gossip.transfer import Offer
from gossipdp.parallel import packing, training_state
from gossipdp.parallel.training_state import Arriving, BetweenSteps, capture, restore


class Keeper(torch.optim.Optimizer):
    """Holds in its state what ``load_state_dict`` alone does not bring back."""

    def __init__(self, params):
        super().__init__(params, {"lr": torch.tensor(0.1)})

    @torch.no_grad()
    def step(self, closure=None):
        self.state["step"] = self.state.get("step", 0) + 1
        self.state["of all"] = [torch.randn(2), "text"]
        for name, value in ("list", ["text", 2]), ("dict", {"a": 1}):
            kinds = ("t", value) if self.state["step"] > 1 else (value, "t")
            self.state[f"a {name} before"], self.state[f"a {name} since"] = kinds
        self.state[f"of step {self.state['step']}"] = {"drawn": torch.randn(2)}
        for parameter in self.param_groups[0]["params"]:
            exact, mask = torch.randn(3, dtype=torch.float64), torch.randn(2, 2) > 0
            nested = {"a": [torch.arange(3), "text", (1.5, None)]}
            self.state[parameter].update(exact=exact, mask=mask, nested=nested, note="text")


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, torch.tensor(0.1)),
    "fused": lambda params: torch.optim.AdamW(params, 0.1, fused=True),
    "adafactor": torch.optim.Adafactor,
    "lbfgs": lambda params: torch.optim.LBFGS(params, history_size=3),
    "keeper": Keeper,
}


def stepped(name: str, steps: int) -> torch.optim.Optimizer:
    """Train in half precision, to which ``load_state_dict`` would cast the state."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).bfloat16()
    optimizer = OPTIMIZERS[name](list(net.parameters()))

    def closure():
        optimizer.zero_grad()
        loss = net(torch.ones(5, 3, dtype=torch.bfloat16)).square().mean()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)
    return optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps_before", [0, 1])
def test_optimizers_come_back_bitwise(name, steps_before):
    torch.manual_seed(0)
    saved = [stepped(name, steps) for steps in (4, 2)]
    restored = [stepped(name, steps_before) for _ in saved]
    restore(there_and_back(capture(saved)), restored)
    for one, other in zip(saved, restored, strict=True):
        assert_bitwise(other.state_dict(), one.state_dict())


def test_settings_come_back_and_parameters_stay():
    """As to a new scheduler; a tensor keeps its memory, which a captured graph reads."""
    weights = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    groups = [{"params": weights[:1], "lr": torch.tensor(0.5)}, {"params": weights[1:]}]
    optimizers = [torch.optim.AdamW(groups, betas=(0.5, 0.6)), torch.optim.SGD(weights, 0.1)]
    saved = there_and_back(capture(optimizers))
    rate = optimizers[0].param_groups[0]["lr"]
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group.update(dict.fromkeys(group.keys() - {"params", "lr"}))
        group["lr"] = group["lr"] * 2
    optimizers[0].param_groups[0]["lr"] = rate.fill_(9.0)
    optimizers[1].param_groups[0]["lr"] = torch.tensor(0.2)  # it was a number
    training_state.restore_groups(saved, optimizers)
    assert_bitwise(capture(optimizers), saved)
    assert optimizers[0].param_groups[0]["lr"] is rate
    assert optimizers[0].param_groups[1]["params"][1] is weights[2]


OTHER_GROUPS = {"state": {}, "param_groups": [{"params": [[], [], [], []]}]}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, "the state is of no optimizers, and there are 1 here"),
        ({"optimizers": 3}, "the state is of no optimizers"),
        ({"optimizers": []}, "of 0 optimizers, and there are 1 here"),
        ({"optimizers": [{}]}, "does not fit optimizer 0, a SGD; make the"),
        ({"optimizers": [OTHER_GROUPS]}, "does not fit optimizer 0, a SGD"),
    ],
)
def test_the_state_of_other_optimizers_is_refused(state, message):
    training_state.refuse_poison(state)  # leaves it to restore
    with pytest.raises(ValueError, match=message):
        restore(state, [stepped("sgd", 1)])


def of_optimizer(**state):
    groups = [{"params": [0], "max": math.inf}]
    return {"optimizers": [{"state": {0: state}, "param_groups": groups}]}


@pytest.mark.parametrize(
    ("dtype", "poison"),
    [
        (torch.float16, math.nan),
        (torch.bfloat16, math.inf),
        (torch.float32, math.nan),
        (torch.float64, math.inf),
        (torch.complex64, math.nan),
        (torch.float8_e4m3fn, math.nan),
    ],
)
def test_poison_is_found_wherever_an_optimizer_keeps_it(dtype, poison):
    sound, poisoned = torch.ones(5), torch.ones(5)
    poisoned[-1] = poison
    sound, poisoned = sound.to(dtype), poisoned.to(dtype)
    sums = torch.full((9,), 3e38)  # of which a sum overflows
    good = of_optimizer(mean=sound, sums=sums, step=torch.tensor(7), best=math.inf)
    training_state.refuse_poison(good)
    with pytest.raises(ValueError, match=r"\[0\]\['state'\]\[0\]\['old'\]\[1\] holds NaN"):
        training_state.refuse_poison(of_optimizer(mean=sound, old=[sound, poisoned]))


def adam(lr: float = 0.5) -> torch.optim.Optimizer:
    """Return an AdamW of one parameter, which has a gradient."""
    weight = nn.Parameter(torch.ones(1000))
    weight.grad = torch.ones(1000)
    return torch.optim.AdamW([weight], lr)


def watched() -> tuple[torch.optim.Optimizer, BetweenSteps]:
    """Return such an AdamW, and its steps as ``Hooks`` announces them."""
    optimizer = adam()
    between = BetweenSteps([optimizer])
    optimizer.register_step_pre_hook(lambda each, *_: between.begins(each))
    optimizer.register_step_post_hook(lambda each, *_: between.ended(each))
    return optimizer, between


def offered(between: BetweenSteps, key: object = "a request") -> Offer:
    return wait_until(lambda: between.offer(key), "another thread has described it")


def taken(offer, max_bytes=1 << 30):
    arriving = Arriving(max_bytes)
    for source, room in zip(offer.tensors, arriving.unfold(offer.layout), strict=True):
        assert offer.copy(source, room)
    return arriving.state()


def test_a_state_is_offered_and_taken_over_bitwise():
    optimizer, other = adam(), adam(lr=0.1)
    optimizer.param_groups[0]["scale"] = torch.ones(())
    other.param_groups[0]["scale"] = torch.ones((), device="meta")
    optimizer.step()
    offer = offered(BetweenSteps([optimizer]))
    assert [tensor.numel() for tensor in offer.tensors] == [4000, 4000], "steps are in the layout"
    restore(taken(offer), [other])
    assert_bitwise(dict(other.state_dict()["state"]), dict(optimizer.state_dict()["state"]))
    assert other.param_groups[0]["lr"] == 0.5
    assert other.param_groups[0]["scale"].is_meta, "it is where its optimizer had it"
    with pytest.raises(ValueError, match="takes more than 7999 bytes, the most that"):
        taken(offer, max_bytes=7999)


def test_nothing_is_read_within_a_step_and_the_waiting_thread_is_woken_after_it():
    optimizer, between = watched()
    woken = []
    between.attach(Device().mark(), lambda: woken.append("woken"))
    optimizer.step()
    assert woken == [], "nobody waits"
    offer = offered(between)
    woken.clear()
    room, seen = torch.empty(4000, dtype=torch.uint8), []
    optimizer.step(lambda: seen.extend([offer.copy(offer.tensors[0], room), list(woken)]))
    assert seen == [False, []]
    assert woken == ["woken"]
    assert offer.copy(offer.tensors[0], room)
    answers = []
    lock = CallingLock(before=lambda: answers.append(offer.copy(offer.tensors[0], room)))
    between._guard = threading.Condition(lock)
    optimizer.step()
    assert answers == [True], "the step has waited for who copies"


def test_the_state_is_described_between_two_steps_by_another_thread(monkeypatch):
    """Many tensors take long, and their worker would be silent meanwhile."""
    optimizer, between = watched()
    optimizer.step()
    woken, go_on = threading.Event(), threading.Event()
    between.attach(Device().mark(), woken.set)
    offer = offered(between, "the first")
    pack, described = packing.pack, threading.Event()
    threads, offers = [], []

    def slowly(*args):
        threads.append(threading.current_thread())
        described.set()
        assert go_on.wait(30.0)
        return pack(*args)

    monkeypatch.setattr(packing, "pack", slowly)
    optimizer.step(lambda: offers.append(between.offer("the second")))
    assert offers == [None]
    assert described.wait(30.0), "once the step has ended"
    room = torch.empty(4000, dtype=torch.uint8)
    woken.clear()
    assert not offer.copy(offer.tensors[0], room), "what is given to another waits as well"
    go_on.set()
    assert woken.wait(30.0)
    second = offered(between, "the second")
    (values,) = taken(second)["optimizers"]
    assert values["state"][0]["step"] == 2
    assert threads != [threading.current_thread()]
    assert len(threads) == 1
    assert offer.copy(offer.tensors[0], room)


def test_who_asks_at_the_very_end_of_a_step_is_woken_or_served():
    """Another thread asks just before the end of the step takes the lock."""
    optimizer, between = watched()
    optimizer.step()
    offer, room = offered(between), torch.empty(4000, dtype=torch.uint8)
    optimizer.step()  # nobody waits any more
    answers, woken = [], []

    def finish():
        lock = CallingLock(before=lambda: answers.append(offer.copy(offer.tensors[0], room)))
        between._guard = threading.Condition(lock)

    mark = Device().mark()
    mark.leave = finish
    between.attach(mark, lambda: woken.append("woken"))
    optimizer.step()
    assert (answers, woken) == ([False], ["woken"])


def test_after_a_step_that_raised_nothing_is_given_until_one_has_ended_or_the_run():
    optimizer, between = watched()
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    for _ in range(5):
        assert between.offer("a request") is None
        time.sleep(0.001)
    optimizer.step()
    assert offered(between).layout
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    assert between.offer("another request") is None
    between.close()
    assert offered(between, "another request").layout


def test_a_state_that_changes_as_it_is_read_is_refused():
    optimizer, between = watched()
    optimizer.register_state_dict_pre_hook(Mock(side_effect=RuntimeError("changed size")))
    with pytest.raises(ValueError, match="state cannot be read now: changed size"):
        between._describe()
