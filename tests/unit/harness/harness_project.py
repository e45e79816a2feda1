"""A small project whose environments are made in no time and whose suites pass, and how to run it."""

import datetime as dt
from pathlib import Path

import harness_builders as build

from mcore_compat.matrix.selection import Selection
from mcore_compat.pipeline.session import RunConfig

NOW = dt.datetime(2026, 11, 30, 10, tzinfo=dt.UTC)
REAL = Path(__file__).parents[3] / "compat_matrix"


class FakeUv:
    @classmethod
    def find(cls, _host):
        return cls()

    def interpreter(self, version):
        return Path(f"python{version}")


class Recorder:
    def __init__(self):
        self.judged = []

    def phase(self, cell_id, phase):
        pass

    def cases(self, cell_id, count):
        pass

    def done(self, result):
        self.judged.append(result.id)


def passing_suite(cell, _environment, _options, out, *_rest):
    out.mkdir(parents=True, exist_ok=True)
    facts = build.suite_facts(cell.megatron_core, mode=cell.expected_mode)
    return build.suite_run(facts=facts)


def config(root, **changes):
    fields = {
        "root": root,
        "cells": root / ".cells",
        "reports": root / "reports",
        "suite": root / "suite",
        "inventory": root / "compat_matrix" / "inventory.toml",
        "selection": Selection(patterns=("0.18.*", "0.19.2")),
        "jobs": 2,
        "profile": "ci",
    }
    return RunConfig(**(fields | changes))
