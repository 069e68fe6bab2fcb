"""The messages a user sees: what happened, with which key and shape, and the corrected call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["LogError"]


class LogError(Exception):
    """A log that can't be carried out as written. The message says why, where, and what to do.

    >>> import jax, lox
    >>> def f(n):
    ...     def body(i):
    ...         lox.log({"i": i})
    ...         return i + 1
    ...     return jax.lax.while_loop(lambda i: i < n, body, 0)
    >>> try:
    ...     lox.spool(f)(3)
    ... except lox.LogError as error:
    ...     print("capacity=1000" in str(error))
    True
    """


LogError.__module__ = "lox"  # as users know it


def _keys(spec: Any) -> str:
    return ", ".join(repr(k) for k in spec.keys)


def _call(name: str, value: str, step: bool) -> str:
    return f"lox.log(…, {name}={value})" if step else f"lox.log({{{name!r}: {value}}})"


def not_an_array(name: str, value: object, line: str, step: bool) -> TypeError:
    what = f"the step {name!r}" if step else f"the value of {name!r}"
    return TypeError(
        f"lox.log at {line}: {what} has a part of type {type(value).__name__}, which is no array, "
        f"number or bool. Log its arrays, e.g. {_call(name, 'jnp.asarray(...)', step)}."
    )


def no_leaves(key: str, line: str) -> TypeError:
    return TypeError(
        f"lox.log at {line}: the value of {key!r} holds no array at all. "
        f"Leave the key out, or log a number: lox.log({{{key!r}: 0.0}})."
    )


def random_key(name: str, line: str, step: bool) -> TypeError:
    what = f"the step {name!r}" if step else f"the value of {name!r}"
    return TypeError(
        f"lox.log at {line}: {what} is a random key, which has no numbers to store. "
        f"Log its data: {_call(name, 'jax.random.key_data(key)', step)}."
    )


def bad_key(key: object, line: str) -> TypeError:
    return TypeError(
        f"lox.log at {line}: keys are strings, this one is {key!r} ({type(key).__name__}). "
        f"Write lox.log({{{str(key)!r}: ...}})."
    )


def not_a_mapping(data: object, line: str) -> TypeError:
    return TypeError(
        f"lox.log at {line}: the data must map names to values, got {type(data).__name__}. "
        'Write lox.log({"name": value}).'
    )


def step_name_taken(name: str, line: str) -> ValueError:
    return ValueError(
        f"{line}: a step can't be named {name!r}, because logdict has an attribute of that name "
        f"(or may have, where it starts with _). Choose another, e.g. {name.strip('_')}_=..."
    )


def unknown_reduction(name: object, known: Iterable[str]) -> ValueError:
    return ValueError(
        f"unknown reduction {name!r}. Known are {', '.join(sorted(known))}; "
        "or pass a lox.Reduction(init, update, merge, finish)."
    )


def not_positive(name: str, value: object) -> ValueError:
    return ValueError(f"{name} must be a positive integer, got {value!r}. Write {name}=100, say.")


def two_shapes(key: str, first: str, here: str, line_first: str, line_here: str) -> ValueError:
    return ValueError(
        f"the key {key!r} is logged with two shapes: {first} at {line_first}, "
        f"and {here} at {line_here}. Rows of one key are stacked, so they must agree. "
        f"Use two names, e.g. {key + '_a'!r} and {key + '_b'!r}, or reshape one of the values."
    )


def two_dtypes(key: str, first: str, here: str, line_first: str, line_here: str) -> ValueError:
    return ValueError(
        f"the key {key!r} is logged as {first} at {line_first} and as {here} at {line_here}, and "
        "neither type holds the other's values exactly. Convert one of them, e.g. "
        f"lox.log({{{key!r}: value.astype({first})}})."
    )


def no_option(caller: str, name: str) -> TypeError:
    return TypeError(
        f"{caller} has no option {name!r}. It has argnames, tags, prefix, keep_logs, every, "
        "interval, reduce, static_argnums and static_argnames."
    )


def two_steps(key: str, first: Any, here: Any, line_first: str, line_here: str) -> ValueError:
    show = lambda names: ", ".join(names) or "no step"
    fix = ", ".join(f"{n}=..." for n in (first or here))
    return ValueError(
        f"the key {key!r} is logged with {show(first)} at {line_first}, but with {show(here)} at "
        f"{line_here}: its steps would not line up with its values. "
        f"Give both the same steps: lox.log({{{key!r}: ...}}, {fix})."
    )


def two_reductions(key: str, first: str, here: str, lines: tuple[str, str]) -> ValueError:
    return ValueError(
        f"the key {key!r} is logged with reduce={first!r} at {lines[0]} and with reduce={here!r} "
        f"at {lines[1]}. One key has one reduction: use two names."
    )


def unbounded(key: str, line: str) -> LogError:
    return LogError(
        f"the key {key!r} (logged at {line}) is inside a while_loop, or a fori_loop with bounds "
        "that are not static, so the number of its events is not known when compiling. Say how "
        "many to keep, lox.spool(f, capacity=1000), or reduce them, lox.spool(f, "
        'reduce="last"), or stream them with lox.tap(f).'
    )


def no_rule(primitive: str, spec: Any, why: str = "") -> LogError:
    why = why or "lox has no rule for it"
    what = "a log" if spec is None else f"the log of {_keys(spec)} at {spec.line}"
    return LogError(
        f"{what} is inside {primitive!r}, and can't be carried "
        f"out of it: {why}. Return the value from it and log it outside, or leave the log out "
        "with lox.nolog(f)."
    )


def at_compile_time(spec: Any) -> LogError:
    return LogError(
        f"the log of {_keys(spec)} at {spec.line} runs while the program is being traced (inside "
        "jax.ensure_compile_time_eval?), where it can't become part of the program. Move it "
        "outside of that block."
    )


def tangent_logged(spec: Any) -> LogError:
    return LogError(
        f"the log of {_keys(spec)} at {spec.line} logs a tangent (in a custom_jvp rule?) of a "
        "program that is being linearized or differentiated in reverse: there the tangent has no "
        "value yet. Log it under jax.jvp, or log the cotangent with lox.log_grad(x, name)."
    )


def ragged(key: str) -> ValueError:
    return ValueError(
        f"compact() can't drop rows of {key!r}: its lanes hold different numbers of events. Take "
        "one lane first: jax.tree.map(lambda x: x[i], logs).compact()."
    )


def traced_compact(key: str) -> ValueError:
    return ValueError(
        f"compact() works on the host, but {key!r} is a traced value. Call it on what the jitted "
        "function returned, or keep the rows and use logs.mask."
    )


def in_log(error: Exception, data: Any, line: str) -> Exception:
    keys = ", ".join(repr(k) for k in data)
    return type(error)(f"lox.log of {keys} at {line}: {error}")


def not_static(fun: Any, leaf: Any) -> TypeError:
    name = getattr(fun, "__name__", "the function")
    return TypeError(
        f"an argument of {name} holds a {type(leaf).__name__}, which JAX can't trace and which "
        "can't be static either, because it is not hashable. Pass arrays, or bind it beforehand: "
        f"lox.spool(functools.partial({name}, ...))."
    )


def not_callable(callback: Any) -> TypeError:
    return TypeError(
        f"the callback of lox.tap must be callable, got {callback!r}. "
        "Write lox.tap(f, lambda logs: ...)."
    )


def not_a_string(name: str, value: Any) -> TypeError:
    return TypeError(f'{name} must be a string, got {value!r}. Write {name}="train/".')


def no_such_number(key: str, value: Any, line: str, error: Exception) -> TypeError:
    return TypeError(
        f"lox.log at {line}: JAX can't represent the value of {key!r}, {value!r} ({error}). "
        f"Convert it: lox.log({{{key!r}: jnp.float32(...)}})."
    )


def two_batches(key: str, first: Any, here: Any, line_first: str, line_here: str) -> ValueError:
    return ValueError(
        f"the key {key!r} is logged in a batch of shape {first} at {line_first}, and in one of "
        f"shape {here} at {line_here} (by vmap, lax.map or shard_map; () is no batch). Rows of one "
        f"key are stacked, so they must agree. Use two names, e.g. {key + '_a'!r} and "
        f"{key + '_b'!r}."
    )


def steps_inside(logs: Any, line: str) -> TypeError:
    names = ", ".join(f"{n}=..." for n in logs.steps)
    return TypeError(
        f"lox.log at {line}: a logdict with steps of its own can't be logged, they would be lost. "
        f"Log its values and give the steps: lox.log(logs.data, {names})."
    )


def no_cotangent(key: str, value: Any, line: str) -> TypeError:
    dtype = getattr(value, "dtype", type(value).__name__)
    return TypeError(
        f"lox.log_grad of {key!r} at {line}: a value of type {dtype} has no gradient. "
        f"Give it the floating point array whose gradient you want: lox.log_grad(x, {key!r})."
    )
