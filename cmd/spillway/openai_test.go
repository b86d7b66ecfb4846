package main

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"

	"spillway/configs"
	"spillway/router"
)

const simModel = "org/sim-model" // names with a slash are what real models have

func named(c *configs.Demo) { c.Sim.Model, c.Sim.Count, c.Sim.Speed = simModel, 2, 20 }

// sdk is OpenAI's client of a front end. It counts the requests that it sends.
func (f *fleet) sdk(retries int, opts ...option.RequestOption) (client openai.Client, tries *atomic.Int32) {
	tries = new(atomic.Int32)
	opts = append([]option.RequestOption{
		option.WithBaseURL(f.url + "/v1/"), option.WithAPIKey("any"), option.WithHTTPClient(f.http), option.WithMaxRetries(retries),
		option.WithMiddleware(func(req *http.Request, next option.MiddlewareNext) (*http.Response, error) {
			tries.Add(1)
			return next(req)
		}),
	}, opts...)
	return openai.NewClient(opts...), tries
}

// sent is the body of an error. The client decodes what is under "error" alone, so that its
// fields stay empty for the flat body, but it keeps all of it.
func sent(failed *openai.Error) string {
	b, err := io.ReadAll(failed.Response.Body)
	if err != nil {
		return err.Error()
	}
	return string(b)
}

func chat(tokens int64, text string) openai.ChatCompletionNewParams {
	return openai.ChatCompletionNewParams{
		Model: simModel, Messages: []openai.ChatCompletionMessageParamUnion{openai.UserMessage(text)}, MaxTokens: openai.Int(tokens),
	}
}

// TestOpenAI uses each route as an application does, through OpenAI's own client.
func TestOpenAI(t *testing.T) { inModes(t, testOpenAI) }

func testOpenAI(t *testing.T, mode router.Mode) {
	f := begin(t, mode, named)
	client, _ := f.sdk(0)
	ctx := t.Context()

	c, err := client.Chat.Completions.New(ctx, chat(5, "Hello"))
	if err != nil || len(c.Choices) != 1 || c.Choices[0].Message.Content == "" || c.Usage.CompletionTokens != 5 || c.Choices[0].FinishReason != "length" {
		t.Errorf("chat = %+v, %v; want one choice of 5 tokens", c, err)
	}
	p, err := client.Completions.New(ctx, openai.CompletionNewParams{
		Model: simModel, Prompt: openai.CompletionNewParamsPromptUnion{OfString: openai.String("Once")}, MaxTokens: openai.Int(3),
	})
	if err != nil || len(p.Choices) != 1 || p.Choices[0].Text == "" || p.Usage.CompletionTokens != 3 {
		t.Errorf("completion = %+v, %v; want one choice of 3 tokens", p, err)
	}
	e, err := client.Embeddings.New(ctx, openai.EmbeddingNewParams{
		Model: simModel, Input: openai.EmbeddingNewParamsInputUnion{OfArrayOfStrings: []string{"one", "two"}},
	})
	if err != nil || len(e.Data) != 2 || len(e.Data[0].Embedding) == 0 {
		t.Errorf("embeddings: %v; want two", err)
	}
	list, err := client.Models.List(ctx)
	if err != nil || len(list.Data) != 1 || list.Data[0].ID != simModel {
		t.Errorf("models = %+v, %v; want %s alone", list, err, simModel)
	}
	m, err := client.Models.Get(ctx, simModel)
	if err != nil || m.ID != simModel || m.Object != "model" {
		t.Errorf("model = %+v, %v; want %s", m, err, simModel)
	}
	var failed *openai.Error
	if _, err := client.Models.Get(ctx, "nobody's"); !errors.As(err, &failed) || failed.StatusCode != 404 || !strings.Contains(sent(failed), "Model not found: nobody's") {
		t.Errorf("unknown model: %v; want 404 with its message", err)
	}
	// max_tokens of 0 passes our checks and is refused by the worker, in the worker's words.
	if _, err := client.Chat.Completions.New(ctx, chat(0, "Hello")); !errors.As(err, &failed) || failed.StatusCode != 400 || !strings.Contains(failed.Message, "max_tokens") {
		t.Errorf("max_tokens 0: %v; want the worker's 400", err)
	}

	params := chat(20, "Hello")
	params.StreamOptions.IncludeUsage = openai.Bool(true)
	stream := client.Chat.Completions.NewStreaming(ctx, params)
	var all openai.ChatCompletionAccumulator
	for stream.Next() {
		if !all.AddChunk(stream.Current()) {
			t.Errorf("chunk %s does not fit what came before", stream.Current().RawJSON())
		}
	}
	if err := stream.Err(); err != nil || all.Usage.CompletionTokens != 20 || len(all.Choices) != 1 || all.Choices[0].FinishReason != "length" {
		t.Errorf("stream: %v, %d tokens; want all 20", err, all.Usage.CompletionTokens)
	}
	f.settled()
}

// occupy makes all workers busy with prompts that are computed for ever, until the returned
// function is called.
func (f *fleet) occupy() (free func()) {
	f.t.Helper()
	ctx, cancel := context.WithCancel(f.t.Context())
	client, _ := f.sdk(0)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		stream := client.Chat.Completions.NewStreaming(ctx, chat(5, strings.Repeat("Hello, worker. ", 100)))
		for stream.Next() {
			continue
		}
	}()
	eventually(f.t, "a slot is held", func() bool {
		for _, n := range f.metrics("spillway_slots_inflight") {
			if n == "1" {
				return true
			}
		}
		return false
	})
	return func() { cancel(); <-ended }
}

func slow(c *configs.Demo) {
	c.Sim.Model, c.Sim.Count, c.Sim.PrefillTokensPerSecond = simModel, 1, 1
	c.Serving.Busy.ActiveDecodeBlocksThreshold, c.Serving.Busy.ActivePrefillTokensThreshold = nil, new(uint64(0))
}

// TestOpenAIOverload checks what an application sees of a refusal in either envelope, and that
// its client tries again as often as it has been set to.
func TestOpenAIOverload(t *testing.T) { inModes(t, testOpenAIOverload) }

func testOpenAIOverload(t *testing.T, mode router.Mode) {
	const message = "Service temporarily unavailable: All workers are busy, please retry later"
	const flat = `{"message":"` + message + `","type":"service_unavailable","code":503}`
	for _, tt := range []struct{ envelope, body, message, kind string }{
		{"flat", flat, "", ""},
		{"openai", `{"error":` + flat + `}`, message, "service_unavailable"},
	} {
		t.Run(tt.envelope, func(t *testing.T) {
			f := begin(t, mode, func(c *configs.Demo) {
				slow(c)
				c.Serving.Proxy.ErrorEnvelope = tt.envelope
			})
			free := f.occupy()
			check := func(what string, err error) {
				var failed *openai.Error
				if !errors.As(err, &failed) {
					t.Fatalf("%s, %s: %v; want an error of the API", tt.envelope, what, err)
				}
				if body := sent(failed); failed.StatusCode != 503 || failed.Message != tt.message || failed.Type != tt.kind || body != tt.body ||
					failed.Response.Header.Get("Retry-After") != "1" {
					t.Errorf("%s, %s: %d, message %q, type %q, %s\nwant 503, %q, %q, %s", tt.envelope, what,
						failed.StatusCode, failed.Message, failed.Type, body, tt.message, tt.kind, tt.body)
				}
			}
			client, tries := f.sdk(1)
			_, err := client.Chat.Completions.New(t.Context(), chat(5, "Hello"))
			check("chat", err)
			if got := tries.Load(); got != 2 {
				t.Errorf("%d requests were sent, want 2 with one retry", got)
			}
			stream := client.Chat.Completions.NewStreaming(t.Context(), chat(5, "Hello"), option.WithMaxRetries(0))
			if stream.Next() {
				t.Errorf("a stream began with %s", stream.Current().RawJSON())
			}
			check("stream", stream.Err())
			const rejected = `dynamo_tasks_rejected_total{endpoint="chat_completions",model="` + simModel + `"}`
			if got := f.metrics(rejected)[rejected]; got != "3" {
				t.Errorf("rejected: %s, want 3: each try counts", got)
			}
			free()
		})
	}
}

// TestOpenAIRetry checks that a client which is refused once is served when it comes back by
// itself.
func TestOpenAIRetry(t *testing.T) { inModes(t, testOpenAIRetry) }

func testOpenAIRetry(t *testing.T, mode router.Mode) {
	f := begin(t, mode, slow)
	free, tries := f.occupy(), 0
	client, _ := f.sdk(2, option.WithMiddleware(func(req *http.Request, next option.MiddlewareNext) (*http.Response, error) {
		tries++
		resp, err := next(req)
		if tries == 1 {
			free()
			eventually(t, "the worker is free", func() bool {
				_, body := fetch(t, f.url+"/v1/models/"+simModel+"/ready")
				return strings.Contains(body, `"busy":0,"free":1`)
			})
		}
		return resp, err
	}))
	e, err := client.Embeddings.New(t.Context(), openai.EmbeddingNewParams{
		Model: simModel, Input: openai.EmbeddingNewParamsInputUnion{OfString: openai.String("x")},
	})
	if err != nil || len(e.Data) != 1 || tries != 2 {
		t.Errorf("after a refusal: %v with %d tries; want an answer at the second", err, tries)
	}
	f.settled()
}

// TestOpenAICancel checks that an application's cancellation stops the worker's work.
func TestOpenAICancel(t *testing.T) { inModes(t, testOpenAICancel) }

func testOpenAICancel(t *testing.T, mode router.Mode) {
	f := begin(t, mode, func(c *configs.Demo) { c.Sim.Model, c.Sim.Count = simModel, 1 })
	client, _ := f.sdk(2)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	stream := client.Chat.Completions.NewStreaming(ctx, chat(5000, "Hello"))
	for range 3 {
		if !stream.Next() {
			t.Fatalf("stream: %v", stream.Err())
		}
	}
	cancel()
	for stream.Next() {
		continue
	}
	if !errors.Is(stream.Err(), context.Canceled) {
		t.Errorf("stream: %v, want that it was cancelled", stream.Err())
	}
	eventually(t, "the worker has stopped the stream", func() bool { return f.stats().Aborted == 1 })

	ctx, cancel = context.WithCancel(t.Context())
	defer cancel()
	answered := make(chan error, 1)
	go func() {
		_, err := client.Chat.Completions.New(ctx, chat(5000, "Hello"))
		answered <- err
	}()
	eventually(t, "the worker generates", func() bool { return f.stats().Running == 1 })
	cancel()
	if err := <-answered; !errors.Is(err, context.Canceled) {
		t.Errorf("unary: %v, want that it was cancelled", err)
	}
	eventually(t, "the worker has stopped the unary request", func() bool { return f.stats().Aborted == 2 })
	if s := f.stats(); s.Finished != 0 || s.Running != 0 || s.Waiting != 0 {
		t.Errorf("afterwards %+v, want nothing finished and nothing running", s)
	}
	f.settled()
}
