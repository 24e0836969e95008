"""/metrics keeps the names that operators know."""

from prometheus_client.parser import text_string_to_metric_families

from jaxserve.serving.metrics import Metrics
from jaxserve.serving.stats import BOUNDS, PhaseTimes, RequestTimings
from tests.serving.api.support import serving

NAMES = {
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "time_to_first_token_seconds_count",
    "inter_token_latency_seconds_count",
    "e2e_request_latency_seconds_count",
    "request_queue_time_seconds_count",
    "request_prefill_time_seconds_count",
    "request_decode_time_seconds_count",
    "request_success_total",
    "step_phase_seconds_count",
}


def samples(page: str) -> dict[tuple[str, ...], float]:
    found = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            assert sample.labels["model_name"] == "tiny"
            labels = [value for name, value in sample.labels.items() if name not in ("model_name", "le")]
            if "le" not in sample.labels:
                found[(sample.name.removeprefix("jaxserve:"), *labels)] = sample.value
    return found


def test_page():
    metrics = Metrics("tiny")
    metrics.step(7, 2)
    metrics.step(0, 3)
    metrics.first_token(0.2)
    metrics.inter_token(0.01)
    timings = RequestTimings("stop", 7, 5, queue=0.1, prefill=0.2, decode=None, first_token=0.3, end_to_end=1.5)
    metrics.request_finished(timings)
    with serving(metrics=metrics) as server:
        response = server.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    found = samples(response.text)
    assert {name for name, *_ in found} >= NAMES
    assert found["prompt_tokens_total",] == 7 and found["generation_tokens_total",] == 5
    assert found["time_to_first_token_seconds_sum",] == 0.2
    assert found["e2e_request_latency_seconds_sum",] == 1.5
    assert found["request_prefill_time_seconds_count",] == 1 and found["request_decode_time_seconds_count",] == 0
    assert found["request_success_total", "stop"] == 1 and found["request_success_total", "abort"] == 0
    assert found["num_requests_waiting",] == 2 and found["kv_cache_usage_perc",] == 0.25
    assert found["prefix_cache_queries_total",] == 100 and found["prefix_cache_hits_total",] == 40
    assert found["step_phase_seconds_count", "host"] == 3 and found["step_phase_seconds_sum", "host"] == 0.5


def test_phases_of_the_engine_fit():
    """The summary that the engine keeps has the buckets that the page expects."""
    times = PhaseTimes()
    times.add(2e-5)
    times.add(99.0)
    summary = times.summary()
    metrics = Metrics("tiny")
    state = {"running": 0, "waiting": 0, "kv_usage": 0.0, "prefix_queries": 0, "prefix_hits": 0, "preemptions": 0}
    metrics.attach(lambda: {**state, "phases": {"host": summary}})
    page = metrics.render()[0].decode()
    assert f'jaxserve:step_phase_seconds_bucket{{le="{BOUNDS[-1]}",model_name="tiny",phase="host"}} 1.0' in page
    assert 'jaxserve:step_phase_seconds_bucket{le="+Inf",model_name="tiny",phase="host"} 2.0' in page


def test_acceptance_of_proposals_under_vllms_names():
    metrics = Metrics("tiny")
    speculation = {"num_drafts": 4, "num_proposed": 12, "num_accepted": 7, "accepted_at": [4, 2, 1]}
    state = {"running": 0, "waiting": 0, "kv_usage": 0.0, "prefix_queries": 0, "prefix_hits": 0, "preemptions": 0}
    metrics.attach(lambda: {**state, "phases": {}, "speculation": speculation})
    found = samples(metrics.render()[0].decode())
    assert found["spec_decode_num_drafts_total",] == 4
    assert found["spec_decode_num_draft_tokens_total",] == 12
    assert found["spec_decode_num_accepted_tokens_total",] == 7
    assert [found["spec_decode_num_accepted_tokens_per_pos_total", str(i)] for i in range(3)] == [4, 2, 1]


def test_without_metrics_there_is_no_page():
    with serving() as server:
        assert server.http.get("/metrics").status_code == 404
