"""More than one engine in a program."""

from typing import Any

from torch.nn.functional import softplus

from tests.harness.models import features, loss_of
from tests.scripts.declared import ALL_RIGHT, RIGHT, WRONG, raises, script


@script(ALL_RIGHT)
def two_engines(trainer: Any) -> None:
    """Another engine trains in turns with this one."""
    other = trainer.another()
    for step in trainer.steps():
        for engine in (trainer, other):
            engine.backward(loss_of(engine, step))
            engine.step()


@script(
    {1: RIGHT, 2: raises("has already been reduced"), 3: raises("has no attribute 'numel'")},
    model="Linears",
    at_rest=False,
)
def gan(trainer: Any, zeroes: bool = True) -> None:
    """The critic's gradient of the generator's loss is dropped by ``zero_grad()`` of the engine."""
    critic = trainer.another()
    for step in trainer.steps():
        noise = features(step).detach()
        fake = trainer(noise)
        if zeroes or not trainer.is_engine:
            critic.zero_grad()
        judged = softplus(-critic(noise.cos())).mean() + softplus(critic(fake.detach())).mean()
        critic.backward(10 * judged)
        critic.step()
        trainer.backward(10 * softplus(-critic(fake)).mean())
        trainer.step()


@script(
    {1: WRONG, 2: raises("has already been reduced"), 3: RIGHT},
    model="Linears",
    warns=RIGHT,
    at_rest=False,
)
def gan_whose_zero_grad_is_swallowed(trainer: Any) -> None:
    """The same by Accelerate, whose optimizer has a ``zero_grad()`` that does nothing."""
    gan(trainer, zeroes=False)


@script({1: WRONG, 2: WRONG, 3: RIGHT}, model="Linears", at_rest=False)
def encoder_of_two_heads(trainer: Any) -> None:
    """An encoder is an engine of its own, and gets its gradients of the backwards of two others."""
    heads = [trainer.another() for _ in range(2)]
    for step in trainer.steps():
        for place, head in enumerate(heads):
            hidden = trainer(features(step).detach() + place)
            head.backward(10 * head(hidden).square().mean())
        for engine in (trainer, *heads):
            engine.step()
