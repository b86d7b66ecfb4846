package proxy

import (
	"math"

	"github.com/prometheus/client_golang/prometheus"

	"spillway/buckets"
)

// families are the names of all series of this package. docs/metrics.md lists them too, and a
// test compares.
type families struct {
	descs []*prometheus.Desc

	// by model
	issued, rejected, queued                            family
	started, requests, active, inflight, waiting        family
	modelRejected, cancelled, migrations, outputTokens  family
	duration, ttft, itl, input, cached, output, embed   family
	migrationTime                                       family
	totalBlocks, maxSeqs, maxBatched, context           family
	blockSize, migrationLimit                           family
	workers, threshold, rejections, retries             family
	queueWait, queueRequests, queueTokens, queueRefused family // only if requests may wait
	stageRequests, stageTime, disconnected, leaks       family // of the process, from here on
	bodyMemory, bodyLimit                               family
	scheduling, routing, routerStarted, routerRequests  family
	routerTTFT, routerITL, routerInput, routerOutput    family
	hashing, chaining, matching, hitRate, unrecorded    family // only in mode kv
	sessionRequests, sessions, sessionLimit             family // only with session affinity
	prompts, decisionBlocks, decisionLimit              family // likewise, the first by model, the second by partition
	poolFullness, poolSaturation, poolReady             family // by pool
	poolCapacity, poolInflight, poolQueue               family
	poolQueueBytes, shed                                family
	compatReadyPods, compatReady, compatPodQueue        family // only with compat-metrics
	compatMeanQueue, compatMeanRunning, compatMeanUsage family
	compatQueueSize, compatSaturation                   family
	compatSaturationStage                               family
	kvActive, kvCapacity, kvRatio                       family // by worker and rank, from here on
	workerDecode, workerPrefill                         family
	lastTTFT, lastInput, lastITL                        family
	workerBusy, rankBusy, transitions                   family
	signalAge, signalStale                              family
	responses, inhibited, circuit, slots                family
	durationShape, ttftShape, itlShape, inputShape      *shape
	cachedShape, outputShape, embedShape, queueShape    *shape
	stageShape, migrationShape, schedulingShape, routed *shape
	hashShape, chainShape, matchShape, hitShape         *shape
}

// newFamilies names the series; prefix begins the front end family, and shapes may change the
// buckets of histograms; compat adds the names that llm-d has for pools.
func newFamilies(prefix string, shapes *buckets.Shapes, compat bool) *families {
	f := &families{}
	f.nameShapes(shapes)
	f.nameModels(prefix + "_")
	f.nameProcess(prefix + "_")
	f.nameWorkers(prefix + "_")
	f.namePools(compat)
	return f
}

func (f *families) add(kind prometheus.ValueType, name, help string, labels []string) family {
	desc := prometheus.NewDesc(name, help, labels, nil)
	f.descs = append(f.descs, desc)
	return family{desc, kind}
}

func (f *families) counter(name, help string, labels ...string) family {
	return f.add(prometheus.CounterValue, name, help, labels)
}

func (f *families) gauge(name, help string, labels ...string) family {
	return f.add(prometheus.GaugeValue, name, help, labels)
}

// histogram names a family of histograms; their shape comes with the values.
func (f *families) histogram(name, help string, labels ...string) family {
	return f.add(prometheus.UntypedValue, name, help, labels)
}

func (f *families) nameShapes(shapes *buckets.Shapes) {
	shape := func(name string, unit float64, bounds ...float64) *shape {
		return newShape(shapes.Of(name, bounds), unit)
	}
	f.durationShape = shape("request_duration_seconds", perSecond, 0, 2, 4, 8, 16, 32, 64, 130, 260, 510)
	f.ttftShape = shape("time_to_first_token_seconds", perSecond, 0, .0022, .0047, .01, .022, .047, .1, .22, .47, 1, 2.2, 4.7, 10, 22, 48, 100, 220, 480)
	f.itlShape = shape("inter_token_latency_seconds", perSecond, 0, .0019, .0035, .0067, .013, .024, .045, .084, .16, .3, .56, 1.1, 2)
	f.inputShape = shape("input_sequence_tokens", perToken, 0, 100, 210, 430, 870, 1800, 3600, 7400, 15000, 31000, 63000, 130000)
	f.cachedShape = shape("cached_tokens", perToken, 0, 100, 210, 430, 870, 1800, 3600, 7400, 15000, 31000, 63000, 130000)
	f.outputShape = shape("output_sequence_tokens", perToken, 0, 100, 210, 430, 880, 1800, 3700, 7600, 16000, 32000)
	f.embedShape = shape("embedding_latency_seconds", perSecond, 0, .002, .0041, .0084, .017, .035, .07, .14, .29, .59, 1.2, 2.4, 4.9, 10)
	f.queueShape = shape("queue_wait_seconds", perSecond, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10)
	f.stageShape = shape("stage_duration_seconds", perSecond, .0001, .0005, .001, .005, .01, .05, .1, .5, 1, 2.5, 5)
	f.migrationShape = shape("model_migration_duration_seconds", perSecond, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 20, 40, 60)
	var tripled []float64
	for i := range 17 {
		tripled = append(tripled, math.Round(math.Pow(3, float64(i)))/100)
	}
	f.schedulingShape = shape("router_overhead_scheduling_ms", perMillisecond, tripled...)
	f.routed = shape("router_overhead_total_ms", perMillisecond, tripled...)
	f.matchShape = shape("router_overhead_indexer_find_matches_ms", perMillisecond, tripled...)
	var doubled, twentieths []float64
	for i := range 15 {
		doubled = append(doubled, math.Ldexp(1, i)/1000)
	}
	f.hashShape = shape("router_overhead_block_hashing_ms", perMillisecond, doubled...)
	f.chainShape = shape("router_overhead_seq_hashing_ms", perMillisecond, doubled...)
	for i := range 21 {
		twentieths = append(twentieths, float64(i)/20)
	}
	f.hitShape = shape("component_router_kv_hit_rate", perMillionth, twentieths...)
}

func (f *families) nameModels(prefix string) {
	f.issued = f.counter("dynamo_tasks_issued_total", "Inference requests that reached admission, those then rejected included.", "model", "endpoint")
	f.rejected = f.counter("dynamo_tasks_rejected_total", "Inference requests answered with the overload status because of load.", "model", "endpoint")
	f.queued = f.gauge("dynamo_queued_requests", "Requests that have not yet received the first byte of an answer from a worker.", "model")
	f.started = f.counter(prefix+"requests_started_total", "Inference requests whose model is known, and those refused before that.", "model", "endpoint", "request_type")
	f.requests = f.counter(prefix+"requests_total", "Inference requests that are over, by what became of them.", "model", "endpoint", "request_type", "status", "error_type")
	f.active = f.gauge(prefix+"active_requests", "Inference requests from their head to the last byte of their answer.", "model")
	f.inflight = f.gauge(prefix+"inflight_requests", "Deprecated: the same as active_requests.", "model")
	f.waiting = f.gauge(prefix+"queued_requests", "The same as dynamo_queued_requests.", "model")
	f.modelRejected = f.counter(prefix+"model_rejection_total", "The same as dynamo_tasks_rejected_total.", "model", "endpoint")
	f.cancelled = f.counter(prefix+"model_cancellation_total", "Requests whose client left before the end of its answer.", "model", "endpoint", "request_type")
	f.migrations = f.counter(prefix+"model_migration_total", "Attempts on a further worker.", "model", "migration_type")
	f.migrationTime = f.histogram(prefix+"model_migration_duration_seconds", "From the failure of an attempt to the first token, or to the end, of the next one.", "model", "migration_type", "outcome")
	f.outputTokens = f.counter(prefix+"output_tokens_total", "Tokens generated, while they are.", "model")
	f.duration = f.histogram(prefix+"request_duration_seconds", "From the head of a request to the last byte of its answer, refusals included.", "model")
	f.ttft = f.histogram(prefix+"time_to_first_token_seconds", "From the head of a streaming request to its first token.", "model")
	f.itl = f.histogram(prefix+"inter_token_latency_seconds", "Time between tokens of a stream; that between two events is divided by the tokens of the later one.", "model")
	f.input = f.histogram(prefix+"input_sequence_tokens", "Prompt tokens of requests that were answered: by the worker's count, else estimated.", "model")
	f.cached = f.histogram(prefix+"cached_tokens", "Prompt tokens that the worker had cached, where it tells.", "model")
	f.output = f.histogram(prefix+"output_sequence_tokens", "Tokens generated for a request, if there were any.", "model")
	f.embed = f.histogram(prefix+"embedding_latency_seconds", "Duration of successful embeddings requests.", "model")
	f.totalBlocks = f.gauge(prefix+"model_total_kv_blocks", "KV blocks of one rank, from the first worker that tells.", "model")
	f.maxSeqs = f.gauge(prefix+"model_max_num_seqs", "Requests at once, from the first worker whose max_concurrency is configured.", "model")
	f.maxBatched = f.gauge(prefix+"model_max_num_batched_tokens", "Tokens of one engine step, from the first worker that tells.", "model")
	f.context = f.gauge(prefix+"model_context_length", "Longest prompt and output in tokens, from the first worker that tells.", "model")
	f.blockSize = f.gauge(prefix+"model_kv_cache_block_size", "Tokens of one KV block, of the first worker.", "model")
	f.migrationLimit = f.gauge(prefix+"model_migration_limit", "Further workers that a request may be tried on.", "model")
	f.workers = f.gauge("spillway_workers", "Registered workers by state.", "model", "state")
	f.threshold = f.gauge("spillway_busy_threshold", "Thresholds in force; one that is not set has no series.", "model", "check")
	f.rejections = f.counter("spillway_rejections_total", "Refused requests by the reason that X-Spillway-Reason gives.", "model", "reason")
	f.queueWait = f.histogram("spillway_queue_wait_seconds", "Time that requests waited for a worker while all were busy, by how that ended.", "model", "outcome")
	f.queueRequests = f.gauge(prefix+"router_queue_pending_requests", "Requests that wait for a worker because all are busy.", "model", "worker_type", "policy_class")
	f.queueTokens = f.gauge(prefix+"router_queue_pending_isl_tokens", "Prompt tokens of these requests.", "model", "worker_type", "policy_class")
	f.queueRefused = f.counter(prefix+"router_queue_backpressure_total", "Requests that found the queue full or waited in vain.", "model", "worker_type", "policy_class", "reason")
	f.retries = f.counter("spillway_upstream_retries_total", "Attempts on a further worker, by why the one before failed.", "model", "reason")
}

func (f *families) nameProcess(prefix string) {
	f.stageRequests = f.gauge(prefix+"stage_requests", "Requests in a stage before the first byte from a worker.", "stage", "phase")
	f.stageTime = f.histogram(prefix+"stage_duration_seconds", "Time that requests spend in a stage.", "stage")
	f.disconnected = f.gauge(prefix+"disconnected_clients", "Clients that left before the end of their answer; only ever goes up.")
	f.leaks = f.counter("spillway_slot_leaks_total", "Reservations whose request was gone; must stay 0.")
	f.bodyMemory = f.gauge("spillway_body_memory_bytes", "Memory that request bodies in flight hold.")
	f.bodyLimit = f.gauge("spillway_body_memory_limit_bytes", "Most that request bodies in flight may hold.")
	const router, component = "dynamo_router_overhead_", "dynamo_component_router_"
	f.scheduling = f.histogram(router+"scheduling_ms", "Time to choose a rank and book the request, or to find that there is none.", "router_id")
	f.routing = f.histogram(router+"total_ms", "Time from a valid request to its booking, or to its refusal.", "router_id")
	f.routerStarted = f.counter(component+"requests_started_total", "Requests that asked for a rank.", "router_id")
	f.routerRequests = f.counter(component+"requests_total", "Those of them that are over.", "router_id")
	f.hashing = f.histogram(router+"block_hashing_ms", "Time to read a prompt's tokens, or its text, and to hash its blocks.", "router_id")
	f.chaining = f.histogram(router+"seq_hashing_ms", "Time to hash the sequences of its blocks.", "router_id")
	f.matching = f.histogram(router+"indexer_find_matches_ms", "Time to find out what ranks have of it.", "router_id")
	f.hitRate = f.histogram(component+"kv_hit_rate", "Part of a prompt that the chosen rank was taken to have cached.", "router_id")
	f.unrecorded = f.counter("spillway_kv_decisions_unrecorded_total", "Prompts that the index had no room for when they were sent to a rank.")
	f.prompts = f.counter("spillway_kv_prompts_total", "Prompts by where the number of their tokens is from: the body, the tokenizer with the tokens or as a count alone, or an estimate.", "model", "source")
	f.decisionBlocks = f.gauge("spillway_kv_decision_blocks", "Blocks that are taken to be cached because their prompt was sent there.", "model", "tenant")
	f.decisionLimit = f.gauge("spillway_kv_decision_blocks_limit", "Most of them in one partition.")
	f.sessionRequests = f.counter("spillway_session_requests_total", "Bookings of requests that name a session, by what became of that: new, kept on its rank, or moved.", "model", "effect")
	f.sessions = f.gauge("spillway_sessions", "Sessions that are remembered.", "model", "tenant")
	f.sessionLimit = f.gauge("spillway_sessions_limit", "Most of them in one partition.")
	f.routerTTFT = f.histogram(component+"time_to_first_token_seconds", "That of all models together.", "router_id")
	f.routerITL = f.histogram(component+"inter_token_latency_seconds", "That of all models together.", "router_id")
	f.routerInput = f.histogram(component+"input_sequence_tokens", "That of all models together.", "router_id")
	f.routerOutput = f.histogram(component+"output_sequence_tokens", "That of all models together.", "router_id")
}

func (f *families) nameWorkers(prefix string) {
	f.kvActive = f.gauge("dynamo_worker_kv_blocks_active", "KV blocks of a rank: promised or reported in use, whichever is more.", "model", "worker", "dp_rank")
	f.kvCapacity = f.gauge("dynamo_worker_kv_blocks_capacity", "KV blocks that a rank has; no series while unknown.", "model", "worker", "dp_rank")
	f.kvRatio = f.gauge("dynamo_worker_kv_blocks_ratio", "What the busy check compares with its threshold; no series while unknown.", "model", "worker", "dp_rank")
	f.workerDecode = f.gauge(prefix+"worker_active_decode_blocks", "KV blocks promised to a rank.", "worker_id", "dp_rank", "worker_type")
	f.workerPrefill = f.gauge(prefix+"worker_active_prefill_tokens", "Prompt tokens that a rank has still to compute.", "worker_id", "dp_rank", "worker_type")
	f.lastTTFT = f.gauge(prefix+"worker_last_time_to_first_token_seconds", "Of the last stream, from sending it to its first token.", "worker_id", "dp_rank", "worker_type")
	f.lastInput = f.gauge(prefix+"worker_last_input_sequence_tokens", "Prompt tokens of the last request that was answered.", "worker_id", "dp_rank", "worker_type")
	f.lastITL = f.gauge(prefix+"worker_last_inter_token_latency_seconds", "Time between the last two tokens of a stream.", "worker_id", "dp_rank", "worker_type")
	f.workerBusy = f.gauge("spillway_worker_busy", "1 while every rank of the worker is busy.", "model", "worker")
	f.rankBusy = f.gauge("spillway_rank_busy", "1 while the check makes the rank busy.", "model", "worker", "dp_rank", "check")
	f.transitions = f.counter("spillway_busy_transitions_total", "Changes of a worker's verdict.", "model", "worker", "to")
	f.signalAge = f.gauge("spillway_signal_age_seconds", "Age of the last sample of a worker's rank that was heard of least recently.", "model", "worker", "source")
	f.signalStale = f.gauge("spillway_signal_stale", "1 while that sample is too old.", "model", "worker", "source")
	f.responses = f.counter("spillway_upstream_responses_total", "Answers of a worker by class of status.", "worker", "code_class")
	f.inhibited = f.gauge("spillway_worker_inhibited", "1 while a worker is left alone after a hard failure.", "worker")
	f.circuit = f.gauge("spillway_circuit_state", "Circuit of a worker: 0 closed, 1 open, 2 half-open.", "worker")
	f.slots = f.gauge("spillway_slots_inflight", "Reservations of requests in flight.", "worker", "dp_rank")
}
