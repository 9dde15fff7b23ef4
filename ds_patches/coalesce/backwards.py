"""Which backward of a window is the last one, where the user says so."""

from __future__ import annotations


class Backwards:
    """The backwards of one window.

    Two things announce the last one: the number that the window was opened with, or a boundary
    that is set to False inside it, and then to True.
    """

    def __init__(self, announced: int | None) -> None:
        self._announced = announced
        self._boundary: bool | None = None  # as last set inside the window
        self._running = False
        self._last = False  # has begun
        self._half_there = self._cut_short = False
        self.begun = 0

    @property
    def is_last(self) -> bool:
        """Whether the backward that has begun was announced as the last one."""
        return self._last

    @property
    def were_cut_short(self) -> bool:
        """Whether one of them left gradients on some parameters and did not end."""
        return self._cut_short or self._half_there

    @property
    def are_over(self) -> bool:
        """Whether the last one that was announced has ended."""
        return self._last and not self._running

    def boundary_is_set(self, boundary: bool) -> None:
        """To True means something only after False: many set it once, for good."""
        if not boundary or self._boundary is not None:
            self._boundary = boundary

    def begin(self) -> None:
        """Raises RuntimeError for one more than was announced."""
        if self._last:
            raise RuntimeError(
                f"backward {self.begun} of this coalesce_grad_reduction() was announced as its "
                "last one, by num_backwards or by set_gradient_accumulation_boundary(True); this "
                "is one more"
            )
        self.begun += 1
        self._cut_short |= self._half_there
        self._running, self._half_there = True, False
        self._last = self.begun == self._announced or self._boundary is True

    def end(self) -> None:
        """The backward that has begun is over."""
        self._running = self._half_there = False

    def gradient_arrives(self) -> None:
        """Of the backward that has begun; one through ``torch.autograd.grad`` brings none."""
        self._half_there = self._running
