"""Lets pytest run what `harness.cases` describes."""


def pytest_generate_tests(metafunc):
    table = getattr(metafunc.function, "cases", None)
    if table:
        names = list(next(iter(table.values())))
        rows = [tuple(case.values()) for case in table.values()]
        metafunc.parametrize(names, rows, ids=list(table))
