"""`pytest tests/faults --everything`: each fault against every requirement, not only against those it names."""


def pytest_addoption(parser):
    parser.addoption(
        "--everything", action="store_true", help="run each fault against all suites, and say all that caught it"
    )
