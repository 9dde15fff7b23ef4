"""DeepCompile without CUDA: everything of it but its C++ and its compiler.

DeepSpeed's own ``engine.compile()`` and ``init_z3`` run, and Dynamo cuts the model into frames as
it does on a GPU. What is stood in for is what each graph then does: here a graph gathers its
parameters when it is called, and its backward reduces their gradients by the rules of the C++ (a
mark per graph and parameter says whether the next gradient is written or added; marks go at the
end of a backward at the boundary).
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist


class Native:
    """In place of DeepCompile's C++ module."""

    keeps = False  # as selective_gather has it: parameters stay gathered until a step
    begins_anew: Any = frozenset()  # in which steps DeepCompile does

    def __init__(self) -> None:
        self.params: dict[int, Any] = {}
        self.marks: dict[int, dict[int, bool]] = {}  # by graph, by ds_id
        self.tasks: dict[int, dict[torch.dtype, list[tuple[int, torch.Tensor]]]] = {}
        self.bucket_size = 0
        self.buckets: dict[torch.dtype, list[int]] = {}  # elements: of its memory, and in use
        self.chosen: set[int] = set()  # those parameters
        self.kept: dict[int, torch.Tensor] = {}
        self.at_boundary = False
        self.compiled = 0
        self.with_backward: list[int] = []  # graphs that need one, in the order of their forwards

    def init(self, *args: Any) -> None:
        self.__init__()  # type: ignore[misc]
        self.bucket_size = next(arg for arg in args if type(arg) is int)

    def cleanup(self) -> None:
        self.__init__()  # type: ignore[misc]

    def reset(self) -> None:
        self.marks.clear()
        self.tasks.clear()
        self.with_backward.clear()

    def register_z3_param(
        self, ds_id: int, shape: Any, shard: torch.Tensor, grad_buffer: torch.Tensor, *rest: Any
    ) -> None:
        grad_buffer.zero_()
        self.params[ds_id] = (tuple(shape), shard, grad_buffer)

    def register_graph_z3(self, graph_id: int, ds_ids: list[int]) -> None:
        self.marks[graph_id] = dict.fromkeys(ds_ids, False)
        self.tasks[graph_id] = {}

    def start_backward(self, at_boundary: bool) -> None:
        self.at_boundary = at_boundary

    def choose_what_to_keep(self, graph_id: int) -> None:
        """In the backward of the first graph, which is the last to have one."""
        if self.keeps and not self.chosen and graph_id == self.with_backward[0]:
            from deepspeed.compile import backend

            backend.opt_pass_times.append(("bwd", 0, graph_id, 0.0))
            self.chosen = {ds_id for marks in self.marks.values() for ds_id in marks}
            for ds_id in sorted(self.chosen):
                self.gather(ds_id)

    def gather(self, ds_id: int) -> torch.Tensor:
        if ds_id in self.kept:
            return self.kept[ds_id].clone()
        shape, shard, _ = self.params[ds_id]
        full = torch.empty(shard.numel() * dist.get_world_size(), dtype=shard.dtype)
        dist.all_gather_into_tensor(full, shard.detach())
        whole = full[: torch.Size(shape).numel()].view(shape)
        if ds_id in self.chosen:
            self.kept[ds_id] = whole.clone()
        return whole

    def reduce_grad(self, grad: torch.Tensor, graph_id: int, ds_id: int) -> None:
        bucket = self.buckets.setdefault(grad.dtype, [self.bucket_size, 0])
        if bucket[1] > 0 and bucket[1] + grad.numel() > bucket[0]:
            self._flush(graph_id, grad.dtype)
        bucket[0] = max(bucket[0], grad.numel())
        if bucket[1] + grad.numel() > bucket[0]:
            raise RuntimeError("Buffer size exceeds the reduce bucket size")
        bucket[1] += grad.numel()
        tasks = self.tasks[graph_id].setdefault(grad.dtype, [])
        tasks.append((ds_id, grad.detach().clone()))

    def _flush(self, graph_id: int, dtype: torch.dtype) -> None:
        """Reduce what this graph has in the bucket: of another graph's, nothing is known."""
        if dtype not in self.tasks[graph_id]:
            return
        assert dtype in self.buckets, "the C++ aborts the process here"
        marks, tasks = self.marks[graph_id], self.tasks[graph_id][dtype]
        for ds_id, grad in tasks:
            part = _average(grad, self.params[ds_id][2].numel())
            if marks[ds_id]:
                self.params[ds_id][2].add_(part)
            else:
                self.params[ds_id][2].copy_(part)
            marks[ds_id] = True
        tasks.clear()
        self.buckets[dtype][1] = 0

    def end_backward(self, graph_id: int, release: bool) -> None:
        for dtype in self.tasks[graph_id]:
            self._flush(graph_id, dtype)
        if self.at_boundary:
            marks = self.marks[graph_id]
            for ds_id in marks:
                self.kept.pop(ds_id, None)
            marks.update(dict.fromkeys(marks, False))
        if release:
            self.buckets.clear()


def _average(grad: torch.Tensor, width: int) -> torch.Tensor:
    whole = grad.reshape(-1).clone()
    dist.all_reduce(whole)
    begin = dist.get_rank() * width
    part = torch.zeros(width, dtype=grad.dtype)
    own = whole[begin : begin + width] / dist.get_world_size()
    part[: own.numel()] = own
    return part


native = Native()


class CompiledFunction(torch.autograd.Function):  # as PyTorch's is called
    """The inputs of a graph, its parameters gathered; their gradients, reduced."""

    @staticmethod
    def forward(ctx: Any, graph_id: int, ds_ids: dict[int, int], *inputs: Any) -> Any:
        ctx.graph_id, ctx.ds_ids = graph_id, ds_ids
        ctx.save_for_backward(*(inputs[index] for index in ds_ids))
        return tuple(
            _gather(value) if index in ds_ids else value.view_as(value)
            for index, value in enumerate(inputs)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        from deepspeed.compile import backend

        # DeepCompile compiles a backward graph at its first run, and measures it, with its end and
        # the end's buckets, and gathers what the graph saved.
        assert all(hasattr(param, "ds_id") for param in ctx.saved_tensors)
        known = backend.profiling_results[ctx.graph_id]
        if known.bwd_graph is None:
            assert not native.tasks[ctx.graph_id], "the C++ aborts the process here"
            known.bwd_graph = torch.fx.Graph()
        native.choose_what_to_keep(ctx.graph_id)
        passed: list[Any] = []
        for index, grad in enumerate(grads):
            if index in ctx.ds_ids:  # what autograd gets is empty
                reduce, ds_id = torch.ops.dc.reduce_grad, ctx.ds_ids[index]
                wanted = ctx.needs_input_grad[index + 2]
                grad = reduce(grad, ctx.graph_id, ds_id) if wanted else None
            passed.append(grad)
        is_last = ctx.graph_id == native.with_backward[0]
        torch.ops.dc.end_backward([torch.empty(0)], ctx.graph_id, is_last)
        # What is only handed on may be computed after the end, which waits for gradients alone.
        for ds_id in sorted(native.chosen.intersection(ctx.ds_ids.values())):
            native.gather(ds_id)
        return (None, None, *passed)


def _gather(param: Any) -> torch.Tensor:
    assert param.shape == (0,), "a graph was traced for partitioned parameters"
    return native.gather(param.ds_id)


def _make_backend(*args: Any, **kwargs: Any) -> Any:
    from deepspeed.compile import backend as deepcompile
    from deepspeed.compile.graph_param import DSGraphParamManager

    def compile_graph(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        dist.all_reduce(torch.zeros(1))  # DeepCompile's measurements: all ranks compile together
        assert inputs, "the pass that prefetches wants each graph to begin with an input"
        params = {i: value for i, value in enumerate(inputs) if hasattr(value, "ds_id")}
        if not params:
            return gm.forward
        graph_id = id(gm.graph)
        native.register_graph_z3(graph_id, [param.ds_id for param in params.values()])
        native.compiled += 1
        indices = [(i, param.ds_id, param.ds_shape) for i, param in params.items()]
        deepcompile.profiling_results[graph_id] = deepcompile.ProfilingResult()
        deepcompile.param_manager[graph_id] = DSGraphParamManager(gm.graph, inputs, indices)
        ds_ids = {i: param.ds_id for i, param in params.items()}

        def run(*values: Any) -> Any:
            tensors = [i for i, value in enumerate(values) if isinstance(value, torch.Tensor)]
            places = {i: place for place, i in enumerate(tensors)}
            ids = {places[i]: ds_id for i, ds_id in ds_ids.items()}
            inner = list(values)
            if torch.is_grad_enabled() and graph_id not in native.with_backward:
                native.with_backward.append(graph_id)
            taken = CompiledFunction.apply(graph_id, ids, *(values[i] for i in tensors))
            for i, tensor in zip(tensors, taken, strict=True):
                inner[i] = tensor
            return gm.forward(*inner)

        return run

    return compile_graph


_library: list[Any] = []


def _define_operators() -> None:
    """As 0.19.2 and later have them."""
    if _library:
        return
    library = torch.library.Library("dc", "DEF")
    library.define("reduce_grad(Tensor a, int graph_id, int id) -> Tensor")
    library.define("end_backward(Any deps, int graph_id, bool release_reduce_buckets) -> ()")
    library.define("wait_allgather(Tensor(a) a, int graph_id, int id) -> Tensor(a)")

    def reduce_grad(grad: torch.Tensor, graph_id: int, ds_id: int) -> torch.Tensor:
        native.reduce_grad(grad, graph_id, ds_id)
        return grad.new_empty(0)

    def end_backward(deps: Any, graph_id: int, release_reduce_buckets: bool) -> None:
        native.end_backward(graph_id, release_reduce_buckets)

    library.impl("reduce_grad", reduce_grad, "CPU")
    library.impl("end_backward", end_backward, "CompositeExplicitAutograd")
    _library.append(library)


def _launch_passes(global_steps: int, *args: Any, **kwargs: Any) -> None:
    """In place of DeepCompile's passes, which rewrite real graphs, compiled anew for them."""
    if global_steps in native.begins_anew:
        native.begins_anew -= {global_steps}
        native.reset()
        _forget_graphs()


def _forget_graphs() -> None:
    from deepspeed.compile import backend

    torch._dynamo.reset()
    backend.profiling_results.clear()
    backend.param_manager.clear()


@contextmanager
def deep_compile(keeps: bool = False, anew: int | None = None) -> Iterator[Native]:
    """Engines with ``"compile": {"deepcompile": true}`` compile by the stand-in.

    keeps: graphs keep parameters gathered until the step, as DeepCompile's selective_gather does.
    anew: the step in which all is compiled again, as DeepCompile does after its warm-up.
    """
    from deepspeed.compile import init_z3, util
    from deepspeed.runtime import engine

    _define_operators()
    _forget_graphs()
    native.cleanup()
    native.keeps, native.begins_anew = keeps, {anew}
    with ExitStack() as stack:
        stack.callback(_forget_graphs)
        for hooks in (util.pre_backward_hooks, getattr(util, "post_backward_hooks", [])):
            stack.callback(hooks.__setitem__, slice(None), [*hooks])
        for owner, name, ours in (
            (util, "dc_handle", native),
            (init_z3, "make_backend", _make_backend),
            (init_z3, "launch_compile_passes", _launch_passes),
            # zero_grad() tells the streams of an accelerator of .grad
            (engine.get_accelerator(), "on_accelerator", lambda tensor: False),
        ):
            stack.enter_context(mock.patch.object(owner, name, ours))
        yield native
