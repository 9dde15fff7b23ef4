"""Questions of a script, each to an engine that has trained, and answered by a plain value."""

import copy
import inspect
import io
import pickle
from collections import namedtuple
from collections.abc import Callable
from dataclasses import make_dataclass
from functools import partial
from importlib import import_module
from itertools import chain, product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nested import as_nested_tensor

from tests.harness import Options, build_engine, parameters
from tests.harness.models import CLASSES, VOCABULARY, WIDTH, batch

OUTPUTS = "transformers.modeling_outputs"
Named = namedtuple("Named", "loss logits hidden")
Data = make_dataclass("Data", Named._fields)
Marked = type("Marked", (Tensor,), {})


PACKS: dict[str, Callable[..., Any]] = {
    "dict": dict,
    "list": lambda **items: [*items.values()],
    "tuple": lambda **items: (*items.values(),),
    "named tuple": Named,
    "dataclass": Data,
    "model output": lambda **items: import_module(OUTPUTS).CausalLMOutput(*items.values()),
    "dict of dicts": lambda loss, **items: {"loss": loss, "all": [items]},
    "nested tensor": lambda loss, hidden, **_: (loss, as_nested_tensor([hidden[:1], hidden[1:]])),
    "sparse tensor": lambda loss, hidden, **_: (loss, hidden.to_sparse()),
    "subclass": lambda loss, hidden, **_: (loss, hidden.as_subclass(Marked)),
}


class Model(nn.Module):
    """Returns a loss, logits and a hidden state, which lead to one another, and keeps them."""

    def __init__(self, pack: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.act = nn.GELU()
        self.classify = nn.Linear(WIDTH, CLASSES)
        self.pack, self.in_forward, self.kept = PACKS[pack], id, None

    def forward(self, tokens: Tensor) -> Any:
        hidden = self.act(self.embed(tokens))
        logits = self.classify(hidden)
        inner = {"loss": F.cross_entropy(logits, tokens % CLASSES), "logits": logits}
        outputs = self.pack(**inner, hidden=hidden)
        if not torch.compiler.is_compiling():
            self.kept = {**inner, "hidden": hidden, "outputs": outputs, "all": flat(outputs)}
            self.in_forward(self.kept)
        return outputs


class Trained:
    def __init__(self, options: Options, pack: str = "dict", compiled: bool = False) -> None:
        self.module = Model(pack)
        if compiled:
            torch._dynamo.reset()
            self.module.compile(fullgraph=True, backend="eager")
        self.engine = build_engine(self.module, options.config, options=options)
        self.micro_steps = options.micro_steps
        self.forward = lambda: self.engine(batch(0)[0])
        self.step()

    def step(self, look: Callable[[Any], Any] = id, **given: Any) -> list[str]:
        """All of a step; the names of parameters that it moved."""
        before = parameters(self.module)
        for _ in range(self.micro_steps):
            look(outputs := self.forward())
            self.engine.backward(flat(outputs)[0], **given)
            self.engine.step()
        return [name for name, now in parameters(self.module).items() if now.ne(before[name]).any()]


def flat(outputs: Any) -> list[Tensor]:
    """Return all tensors in it, the loss first."""
    if isinstance(outputs, Tensor):
        return [outputs]
    items = outputs if isinstance(outputs, (dict, list, tuple)) else vars(outputs)
    return [*chain(*map(flat, items.values() if isinstance(items, dict) else items))]


def identity(one: Trained) -> Any:
    outputs, kept = one.forward(), one.module.kept
    same = [mine is theirs for mine, theirs in zip(kept["all"], flat(outputs), strict=True)]
    return same, kept["outputs"] is outputs, [str(type(it)) for it in (outputs, *flat(outputs))]


def changed(one: Trained, of: str, at: str, change: Callable[[Tensor], Any]) -> Any:
    """A tensor that the model has "kept", or "returned" to the script, or has in its "forward"."""

    def look(outputs: Any) -> None:
        change((one.module.kept if of == "kept" else outputs)[at])

    if of == "forward":
        one.module.in_forward = look
    return one.step(id if of == "forward" else look)


def hooked(one: Trained, of: str, at: str) -> Any:
    """A hook sees a gradient and makes it zero: what lies before does not move."""
    seen = []
    zero = lambda grad: seen.append(bool(grad.any())) or grad * 0  # noqa: E731
    return changed(one, of, at, lambda tensor: tensor.register_hook(zero)), seen


def reached(one: Trained, of: str, retained: bool) -> bool:
    """Whether a hidden state gets a gradient."""
    loss = (outputs := one.forward())["loss"]
    hidden = (one.module.kept if of == "kept" else outputs)["hidden"]
    if not retained:
        return bool(torch.autograd.grad(loss, hidden)[0].any())
    hidden.retain_grad()
    one.engine.backward(loss)
    return hidden.grad is not None and bool(hidden.grad.any())


def averaged(module: nn.Module) -> Any:
    (found := torch.optim.swa_utils.AveragedModel(module)).update_parameters(module)
    return found.module


def saved(module: nn.Module) -> Any:
    torch.save(module, file := io.BytesIO())
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def pickled(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


def copied(one: Trained, how: Callable[[nn.Module], nn.Module], inside: bool) -> Any:
    """What the copy has, and whether it runs; and the engine trains on."""
    from deepspeed.runtime.zero import GatheredParameters

    one.module.kept, params = None, [*one.module.parameters()]
    with GatheredParameters(params, enabled=inside and hasattr(params[0], "ds_id")):
        other = how(one.engine.module)
    kinds = [(name, str(type(p)), *p.shape) for name, p in other.named_parameters()]
    try:
        runs = str([output.shape for output in flat(other(batch(0)[0]))])
    except Exception as error:
        runs = type(error).__name__
    return kinds, runs, one.step()


def attributes(one: Trained) -> Any:
    # Stock's own functions count in it, in whose place are ours.
    own = [sorted({*vars(m)} - {"applied_pre_backward_ref_cnt"}) for m in one.module.modules()]
    kinds = [type(module.forward).__name__ for module in one.module.modules()]
    return kinds, own, [sorted(vars(param)) for param in one.module.parameters()]


def signatures(one: Trained) -> list[str]:
    import deepspeed

    functions = [getattr(one.engine, name) for name in ("forward", "backward", "step")]
    functions += [deepspeed.initialize, deepspeed.checkpointing.checkpoint]
    return [str(inspect.signature(function)) for function in functions]


def keeps_checkpoint(one: Trained) -> Any:
    """A model may keep the function by which it recomputes."""
    import deepspeed

    here = nn.Module()
    here.recompute = deepspeed.checkpointing.checkpoint
    copies = copy.deepcopy(here), pickled(here), copy.copy(here)
    return [other.recompute is here.recompute for other in copies], pickle.dumps(here)


#: What is asked, and how the engine is built.
EVERY: dict[str, tuple[Any, ...]] = {
    **{f"identity in a {pack}": (identity, pack) for pack in PACKS},
    "hook in the forward": (partial(hooked, of="forward", at="hidden"),),
    "attributes": (attributes,),
    "signatures": (signatures,),
    "checkpoint": (keeps_checkpoint,),
    "backward(no=)": (lambda one: one.step(no=1),),
    "step(no=)": (lambda one: one.engine.step(no=1),),
    "compiled": (Trained.step, "dict", True),
    "a copy of the engine": (lambda one: str(type(copy.deepcopy(one.engine))),),
    "a pickle of the engine": (lambda one: str(type(pickled(one.engine))),),
    "a copy of its optimizer": (lambda one: str(copy.deepcopy(one.engine.optimizer)),),
    "its state": (lambda one: [*map(str, one.engine.optimizer.state_dict())],),
}
for of in ("kept", "returned"):
    EVERY |= {
        **{f"hook on {at} {of}": (partial(hooked, of=of, at=at),) for at in Named._fields},
        f"retain_grad {of}": (partial(reached, of=of, retained=True),),
        f"autograd.grad {of}": (partial(reached, of=of, retained=False),),
        f"in place {of}": (partial(changed, of=of, at="logits", change=lambda it: it.mul_(1)),),
        f"detach_ {of}": (partial(changed, of=of, at="hidden", change=Tensor.detach_),),
    }
for how, inside in product((copy.deepcopy, copy.copy, averaged, saved, pickled), (False, True)):
    EVERY[f"{how.__name__}{', gathered' * inside}"] = (partial(copied, how=how, inside=inside),)
