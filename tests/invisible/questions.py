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

    def step(self, look: Callable[[Any], Any] = id, **arguments: Any) -> list[str]:
        """All of a step; the names of parameters that it moved."""
        before = parameters(self.module)
        for _ in range(self.micro_steps):
            look(outputs := self.forward())
            self.engine.backward(flat(outputs)[0], **arguments)
            self.engine.step()
        return [name for name, now in parameters(self.module).items() if now.ne(before[name]).any()]


def flat(outputs: Any) -> list[Tensor]:
    """Return all tensors in it, the loss first."""
    if isinstance(outputs, Tensor):
        return [outputs]
    items = outputs if isinstance(outputs, (dict, list, tuple)) else vars(outputs)
    return [*chain(*map(flat, items.values() if isinstance(items, dict) else items))]


def identity(trained: Trained) -> Any:
    outputs, memo = trained.forward(), trained.module.kept
    same = [tensor is theirs for tensor, theirs in zip(memo["all"], flat(outputs), strict=True)]
    return same, memo["outputs"] is outputs, [str(type(it)) for it in (outputs, *flat(outputs))]


def changed(trained: Trained, of: str, name: str, change: Callable[[Tensor], Any]) -> Any:
    """A tensor that the model has "kept", or "returned" to the script, or has in its "forward"."""

    def look(outputs: Any) -> None:
        change((trained.module.kept if of == "kept" else outputs)[name])

    if of == "forward":
        trained.module.in_forward = look
    return trained.step(id if of == "forward" else look)


def hooked(trained: Trained, of: str, name: str) -> Any:
    """A hook sees a gradient and makes it zero: what lies before does not move."""
    seen = []
    zero = lambda grad: seen.append(bool(grad.any())) or grad * 0  # noqa: E731
    return changed(trained, of, name, lambda tensor: tensor.register_hook(zero)), seen


def reached(trained: Trained, of: str, retained: bool) -> bool:
    """Return True if a hidden state gets a gradient."""
    loss = (outputs := trained.forward())["loss"]
    hidden = (trained.module.kept if of == "kept" else outputs)["hidden"]
    if not retained:
        return bool(torch.autograd.grad(loss, hidden)[0].any())
    hidden.retain_grad()
    trained.engine.backward(loss)
    return hidden.grad is not None and bool(hidden.grad.any())


def averaged(module: nn.Module) -> Any:
    (average := torch.optim.swa_utils.AveragedModel(module)).update_parameters(module)
    return average.module


def saved(module: nn.Module) -> Any:
    torch.save(module, file := io.BytesIO())
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def copied(trained: Trained, how: Callable[[nn.Module], nn.Module], inside: bool) -> Any:
    """Return the copy's parameters and outputs, and the parameters that the engine then moves."""
    from deepspeed.runtime.zero import GatheredParameters

    trained.module.kept, params = None, [*trained.module.parameters()]
    with GatheredParameters(params, enabled=inside and hasattr(params[0], "ds_id")):
        other = how(trained.engine.module)
    kinds = [(name, str(type(p)), *p.shape) for name, p in other.named_parameters()]
    try:
        runs = str([output.shape for output in flat(other(batch(0)[0]))])
    except Exception as error:
        runs = type(error).__name__
    return kinds, runs, trained.step()


def attributes(trained: Trained) -> Any:
    # Stock's own functions count in it, in whose place are ours.
    own = [sorted({*vars(m)} - {"applied_pre_backward_ref_cnt"}) for m in trained.module.modules()]
    kinds = [type(module.forward).__name__ for module in trained.module.modules()]
    return kinds, own, [sorted(vars(param)) for param in trained.module.parameters()]


def signatures(trained: Trained) -> list[str]:
    import deepspeed

    functions = [getattr(trained.engine, name) for name in ("forward", "backward", "step")]
    functions += [deepspeed.initialize, deepspeed.checkpointing.checkpoint]
    return [str(inspect.signature(function)) for function in functions]


def keeps_checkpoint(trained: Trained) -> Any:
    """A model may keep the function by which it recomputes."""
    import deepspeed

    module = nn.Module()
    module.recompute = deepspeed.checkpointing.checkpoint
    copies = copy.deepcopy(module), pickled(module), copy.copy(module)
    return [other.recompute is module.recompute for other in copies], pickle.dumps(module)


#: What is asked, and how the engine is built.
EVERY: dict[str, tuple[Any, ...]] = {
    **{f"identity in a {pack}": (identity, pack) for pack in PACKS},
    "hook in the forward": (partial(hooked, of="forward", name="hidden"),),
    "attributes": (attributes,),
    "signatures": (signatures,),
    "checkpoint": (keeps_checkpoint,),
    "backward(no=)": (lambda trained: trained.step(no=1),),
    "step(no=)": (lambda trained: trained.engine.step(no=1),),
    "compiled": (Trained.step, "dict", True),
    "a copy of the engine": (lambda trained: str(type(copy.deepcopy(trained.engine))),),
    "a pickle of the engine": (lambda trained: str(type(pickled(trained.engine))),),
    "a copy of its optimizer": (lambda trained: str(copy.deepcopy(trained.engine.optimizer)),),
    "its state": (lambda trained: [*map(str, trained.engine.optimizer.state_dict())],),
}
for of in ("kept", "returned"):
    EVERY |= {
        **{f"hook on {name} {of}": (partial(hooked, of=of, name=name),) for name in Named._fields},
        f"retain_grad {of}": (partial(reached, of=of, retained=True),),
        f"autograd.grad {of}": (partial(reached, of=of, retained=False),),
        f"in place {of}": (partial(changed, of=of, name="logits", change=lambda it: it.mul_(1)),),
        f"detach_ {of}": (partial(changed, of=of, name="hidden", change=Tensor.detach_),),
    }
for how, inside in product((copy.deepcopy, copy.copy, averaged, saved, pickled), (False, True)):
    EVERY[f"{how.__name__}{', gathered' * inside}"] = (partial(copied, how=how, inside=inside),)
