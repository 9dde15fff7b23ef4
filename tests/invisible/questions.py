"""Questions of a script, each to an engine that has trained, and answered by a plain value."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.training.models import CLASSES, VOCABULARY, WIDTH, batch
from tests.training.options import Options
from tests.training.parameters import parameters
from tests.training.surroundings import build_engine

Question = Callable[[Any], Any]


class Named(NamedTuple):
    loss: Tensor
    logits: Tensor
    hidden: Tensor


@dataclass
class Data:
    loss: Tensor
    logits: Tensor
    hidden: Tensor


class Marked(Tensor):
    """A subclass of a user's."""


def model_output(**items: Tensor) -> Any:
    from transformers.modeling_outputs import CausalLMOutput

    return CausalLMOutput(items["loss"], items["logits"], hidden_states=(items["hidden"],))


PACKS: dict[str, Callable[..., Any]] = {
    "dict": dict,
    "list": lambda **items: [*items.values()],
    "tuple": lambda **items: (*items.values(),),
    "named tuple": Named,
    "dataclass": Data,
    "model output": model_output,
    "nested dict": lambda **items: {"loss": items["loss"], "all": [{"at": (items["hidden"],)}]},
    "nested tensor": lambda **items: (
        items["loss"],
        torch.nested.as_nested_tensor([items["hidden"][:1], items["hidden"][1:]]),
    ),
    "sparse tensor": lambda **items: (items["loss"], items["hidden"].to_sparse()),
    "subclass": lambda **items: (items["loss"], items["hidden"].as_subclass(Marked)),
}


class Model(nn.Module):
    """Returns a loss, logits and a hidden state, which lead to one another, and keeps them."""

    def __init__(self, pack: str = "dict", in_forward: Question = lambda _: None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.act = nn.GELU()
        self.classify = nn.Linear(WIDTH, CLASSES)
        self.pack, self.in_forward = pack, in_forward
        self.kept: Any = None

    def forward(self, tokens: Tensor) -> Any:
        hidden = self.act(self.embed(tokens))
        logits = self.classify(hidden)
        loss = F.cross_entropy(logits, tokens % CLASSES)
        self.in_forward(hidden)
        outputs = PACKS[self.pack](loss=loss, logits=logits, hidden=hidden)
        if not torch.compiler.is_compiling():
            self.kept = SimpleNamespace(loss=loss, logits=logits, hidden=hidden, outputs=outputs)
        return outputs


class Trained:
    """An engine after a step."""

    def __init__(self, options: Options, model: Model, before: Question = lambda _: None) -> None:
        torch.manual_seed(7)
        before(model)
        self.module, self.engine = model, build_engine(model, options.config, options=options)
        self.micro_steps = options.micro_steps
        self.step()

    def forward(self) -> Any:
        return self.engine(batch(0)[0])

    def step(self, around: Callable[[Any], None] = lambda _: None, **given: Any) -> list[str]:
        """All of a step; the names of parameters that it moved."""
        before = parameters(self.module)
        for _ in range(self.micro_steps):
            outputs = self.forward()
            around(outputs)
            self.engine.backward(flat(outputs)[0], **given)
            self.engine.step()
        return [name for name, now in parameters(self.module).items() if now.ne(before[name]).any()]


def flat(outputs: Any) -> list[Tensor]:
    """Return all tensors in it, the loss first."""
    if isinstance(outputs, Tensor):
        return [outputs]
    if not isinstance(outputs, (dict, list, tuple)):
        outputs = vars(outputs)
    items = outputs.values() if isinstance(outputs, dict) else outputs
    return [tensor for item in items for tensor in flat(item)]


# --- Outputs --------------------------------------------------------------------------------------


def identity(trained: Trained) -> Any:
    """Is it what the model has kept, and of what types?"""
    outputs = trained.forward()
    kept = trained.module.kept
    tensors = list(zip(flat(kept.outputs), flat(outputs), strict=True))
    same = [one is other for one, other in tensors], kept.outputs is outputs
    return same, str(type(outputs)), [str(type(one)) for one in flat(outputs)], trained.step()


def hooked(trained: Trained, of: str, at: str = "hidden") -> Any:
    """Does a hook see a gradient, and may it change it? An embedding behind zeros does not move."""
    seen = []

    def hook(grad: Tensor) -> Tensor:
        seen.append(bool(grad.any()))
        return grad * 0

    def around(outputs: Any) -> None:
        thing = outputs if of == "returned" else vars(trained.module.kept)
        thing[at].register_hook(hook)

    return trained.step(around), seen


def hooked_in_forward(trained: Trained) -> Any:
    seen = []
    trained.module.in_forward = lambda hidden: hidden.register_hook(
        lambda grad: seen.append(bool(grad.any())) or grad * 0
    )
    return trained.step(), seen


def retained(trained: Trained, of: str) -> Any:
    """Does `retain_grad` give a gradient?"""
    outputs = trained.forward()
    hidden = (outputs if of == "returned" else vars(trained.module.kept))["hidden"]
    hidden.retain_grad()
    trained.engine.backward(outputs["loss"])
    return hidden.grad is not None and bool(hidden.grad.any())


def by_autograd(trained: Trained, of: str) -> Any:
    """Does `torch.autograd.grad` reach a hidden state?"""
    outputs = trained.forward()
    hidden = (outputs if of == "returned" else vars(trained.module.kept))["hidden"]
    (grad,) = torch.autograd.grad(outputs["loss"], hidden)
    return bool(grad.any())


def in_place(trained: Trained, change: Callable[[Tensor], Any], of: str, at: str) -> Any:
    def around(outputs: Any) -> None:
        change((outputs if of == "returned" else vars(trained.module.kept))[at])

    return trained.step(around)


# --- The module -----------------------------------------------------------------------------------


def gathered(trained: Trained) -> Any:
    from deepspeed.runtime.zero import GatheredParameters

    params = [*trained.module.parameters()]
    return GatheredParameters(params, enabled=hasattr(params[0], "ds_id"))


def averaged(module: nn.Module) -> Any:
    found = torch.optim.swa_utils.AveragedModel(module)
    found.update_parameters(module)
    return found.module


def saved(module: nn.Module) -> Any:
    torch.save(module, io.BytesIO())
    return module


def pickled(module: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(module))


def copied(trained: Trained, how: Callable[[nn.Module], nn.Module], inside: bool = False) -> Any:
    """What of the copy, and does it run? And does the engine train on?"""
    trained.module.kept = None
    del trained.module.in_forward
    if inside:
        with gathered(trained):
            other = how(trained.engine.module)
    else:
        other = how(trained.engine.module)
    kinds = [(name, str(type(one)), *map(str, one.shape)) for name, one in other.named_parameters()]
    other.in_forward = trained.module.in_forward = lambda _: None
    try:
        runs = [str(one.shape) for one in flat(other(batch(0)[0]))]
    except Exception as error:
        runs = [str(type(error))]
    return kinds, runs, trained.step()


def attributes(trained: Trained) -> Any:
    """What lies in the modules and parameters, and is their `forward` their own?"""
    # Stock's own functions count in it, in whose place are ours.
    own = [sorted({*vars(m)} - {"applied_pre_backward_ref_cnt"}) for m in trained.module.modules()]
    kinds = [type(module.forward).__name__ for module in trained.module.modules()]
    return kinds, own, [sorted(vars(param)) for param in trained.module.parameters()]


# --- Functions ------------------------------------------------------------------------------------


def signatures(trained: Trained) -> list[str]:
    import deepspeed

    engine = trained.engine
    functions = (engine.forward, engine.backward, engine.step, type(engine).step)
    more = (deepspeed.initialize, deepspeed.checkpointing.checkpoint)
    return [str(inspect.signature(one)) for one in (*functions, *more)]


def keeps_checkpoint(trained: Trained) -> Any:
    """A model may keep the function by which it recomputes."""
    import deepspeed

    here = nn.Module()
    here.recompute = deepspeed.checkpointing.checkpoint
    copies = copy.deepcopy(here), pickle.loads(pickle.dumps(here)), copy.copy(here)
    return [one.recompute is here.recompute for one in copies], pickle.dumps(here)


def of_engine(trained: Trained, how: Callable[[Any], Any]) -> str:
    return str(type(how(trained.engine)))


EVERY: dict[str, tuple[Question, dict[str, Any]]] = {
    **{f"identity in a {pack}": (identity, {"pack": pack}) for pack in PACKS},
    "hook in forward": (hooked_in_forward, {}),
    **{
        f"{name} {of}": (partial(question, of=of), {})
        for of in ("kept", "returned")
        for name, question in {
            "hook on": hooked,
            "hook on the logits": partial(hooked, at="logits"),
            "retain_grad of": retained,
            "autograd.grad of": by_autograd,
            "in place": partial(in_place, change=lambda one: one.mul_(1), at="logits"),
            "detach_": partial(in_place, change=Tensor.detach_, at="hidden"),
        }.items()
    },
    **{
        f"{how.__name__} {'gathered' * inside}": (partial(copied, how=how, inside=inside), {})
        for how in (copy.deepcopy, copy.copy, averaged, saved, pickled)
        for inside in (False, True)
    },
    "attributes": (attributes, {}),
    "signatures": (signatures, {}),
    "checkpoint": (keeps_checkpoint, {}),
    "backward(no=)": (lambda trained: trained.step(no=1), {}),
    "step(no=)": (lambda trained: trained.engine.step(no=1), {}),
    "compiled": (
        lambda trained: trained.step(),
        {"before": lambda model: model.compile(fullgraph=True, backend="eager")},
    ),
    "a copy of the engine": (partial(of_engine, how=copy.deepcopy), {}),
    "a pickle of the engine": (partial(of_engine, how=pickle.dumps), {}),
    "a copy of its optimizer": (partial(of_engine, how=lambda e: copy.deepcopy(e.optimizer)), {}),
    "its state": (lambda trained: [*map(str, trained.engine.optimizer.state_dict())], {}),
}
