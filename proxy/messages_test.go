package proxy_test

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/anthropics/anthropic-sdk-go"
	anthropicoption "github.com/anthropics/anthropic-sdk-go/option"
	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/responses"

	"spillway/proxy"
)

// The events of a short message.
const (
	messageStart = "event: message_start\n" + `data: {"type":"message_start","message":{"id":"msg","type":"message","role":"assistant","model":"m","content":[],"stop_reason":null,"usage":{"input_tokens":12,"output_tokens":1}}}` + "\n\n"
	blockStart   = "event: content_block_start\n" + `data: {"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}` + "\n\n"
	blockHello   = "event: content_block_delta\n" + `data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"Hello"}}` + "\n\n"
	blockStop    = "event: content_block_stop\n" + `data: {"type":"content_block_stop","index":0}` + "\n\n"
	messageDelta = "event: message_delta\n" + `data: {"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":7}}` + "\n\n"
	messageStop  = "event: message_stop\n" + `data: {"type":"message_stop"}` + "\n\n"

	message       = `{"id":"msg","type":"message","role":"assistant","model":"m","content":[{"type":"text","text":"Hello"}],"stop_reason":"end_turn","usage":{"input_tokens":12,"output_tokens":7}}`
	messageBody   = `{"model":"m","max_tokens":10,"messages":[{"role":"user","content":"Hi"}]}`
	messageStream = `{"model":"m","max_tokens":10,"stream":true,"messages":[{"role":"user","content":"Hi"}]}`
)

func withMessages(c *proxy.Config) { c.EnableAnthropicAPI = true }

// claude is Anthropic's client of a front end.
func (f *front) claude() anthropic.Client {
	return anthropic.NewClient(anthropicoption.WithBaseURL(f.url), anthropicoption.WithAPIKey("sesame"),
		anthropicoption.WithHTTPClient(f.client), anthropicoption.WithMaxRetries(0))
}

func saidHi() anthropic.MessageNewParams {
	return anthropic.MessageNewParams{
		Model: "m", MaxTokens: 10, Messages: []anthropic.MessageParam{anthropic.NewUserMessage(anthropic.NewTextBlock("Hi"))},
	}
}

// TestAnthropic uses the routes as an application does, through Anthropic's own client.
func TestAnthropic(t *testing.T) {
	s := newScript(t, func(c *conn, r received) {
		switch {
		case r.path == "/v1/messages/count_tokens":
			c.say(answer(200, jsonHeader, `{"input_tokens":12}`))
		case strings.Contains(r.body, `"stream":true`):
			streaming(messageStart, blockStart+blockHello, blockStop, messageDelta+messageStop)(c, r)
		default:
			c.say(answer(200, jsonHeader, message))
		}
	})
	log := &lines{}
	f := begin(t, setup{log: log.logger(), proxy: func(c *proxy.Config) { withMessages(c); c.APIKey = "sesame" }}, served("w", s))
	client := f.claude()

	m, err := client.Messages.New(t.Context(), saidHi())
	if err != nil || len(m.Content) != 1 || m.Content[0].Text != "Hello" || m.Usage.OutputTokens != 7 {
		t.Errorf("message = %+v, %v", m, err)
	}
	stream := client.Messages.NewStreaming(t.Context(), saidHi())
	var all anthropic.Message
	for stream.Next() {
		if err := all.Accumulate(stream.Current()); err != nil {
			t.Errorf("event %s: %v", stream.Current().RawJSON(), err)
		}
	}
	if err := stream.Err(); err != nil || len(all.Content) != 1 || all.Content[0].Text != "Hello" || all.StopReason != "end_turn" || all.Usage.OutputTokens != 7 {
		t.Errorf("stream = %+v, %v", all, err)
	}
	n, err := client.Messages.CountTokens(t.Context(), anthropic.MessageCountTokensParams{Model: "m", Messages: saidHi().Messages})
	if err != nil || n.InputTokens != 12 {
		t.Errorf("tokens = %+v, %v, want 12", n, err)
	}
	for _, r := range s.seen() {
		if r.header.Get("X-Api-Key") != "" || r.header.Get("Anthropic-Version") == "" {
			t.Errorf("the worker got %v, want the version and no key", r.header)
		}
	}
	eventually(t, "both requests are logged", func() bool {
		return strings.Count(log.String(), "endpoint=anthropic_messages request_type=") == 2 && strings.Count(log.String(), "prompt_tokens=12 output_tokens=7") == 2
	})
	if !strings.Contains(log.String(), "ttft_ms=") {
		t.Errorf("the first token was not seen: %s", log)
	}
	if got := f.metric(`dynamo_tasks_issued_total{endpoint="anthropic_messages",model="m"}`); got != "2" {
		t.Errorf("%s requests were issued, want 2: counting is none", got)
	}
}

// failures are the statuses that a client may see, each with what leads to it.
var failures = []struct {
	status      int
	change      func(*proxy.Config)
	worker      func(*conn, received)
	model       string // "" is m
	text        string // of the prompt, "" is Hi
	kind        string // as Anthropic calls it
	contentType string
}{
	{status: 400, text: "-", kind: "invalid_request_error"}, // no messages
	{status: 401, change: func(c *proxy.Config) { c.APIKey = "other" }, kind: "authentication_error"},
	{status: 404, model: "nope", kind: "not_found_error"},
	{status: 413, change: func(c *proxy.Config) { c.BodyLimitMB = 1 }, text: strings.Repeat("x", 2<<20), kind: "request_too_large"},
	{status: 415, contentType: "text/plain", kind: "api_error"},
	{status: 429, change: func(c *proxy.Config) { c.OverloadStatusCode = "429" }, worker: saying(answer(429, "", "")), kind: "rate_limit_error"},
	{status: 500, worker: saying(answer(500, "", "")), kind: "api_error"},
	{status: 502, worker: func(c *conn, _ received) { c.reset() }, kind: "api_error"},
	{status: 503, worker: saying(answer(429, "", "")), kind: "overloaded_error"},
	{status: 503, worker: saying(answer(503, "", "")), kind: "overloaded_error"},
	{status: 504, worker: saying(answer(504, "", "")), kind: "api_error"},
	{status: 529, change: func(c *proxy.Config) { c.OverloadStatusCode = "529" }, worker: saying(answer(529, "", "")), kind: "overloaded_error"},
}

// TestAnthropicErrors checks that each failure reaches an application as the type it knows.
func TestAnthropicErrors(t *testing.T) {
	for _, tt := range failures {
		t.Run(fmt.Sprint(tt.status, tt.kind), func(t *testing.T) {
			f, _ := failsWith(t, tt.worker, func(c *proxy.Config) {
				withMessages(c)
				if tt.change != nil {
					tt.change(c)
				}
			})
			params := saidHi()
			if tt.model != "" {
				params.Model = anthropic.Model(tt.model)
			}
			switch tt.text {
			case "":
			case "-":
				params.Messages = []anthropic.MessageParam{}
			default:
				params.Messages = []anthropic.MessageParam{anthropic.NewUserMessage(anthropic.NewTextBlock(tt.text))}
			}
			var opts []anthropicoption.RequestOption
			if tt.contentType != "" {
				opts = append(opts, anthropicoption.WithHeader("Content-Type", tt.contentType))
			}
			client := f.claude()
			_, err := client.Messages.New(t.Context(), params, opts...)
			check := func(what string, err error) {
				t.Helper()
				var failed *anthropic.Error
				if !errors.As(err, &failed) || failed.StatusCode != tt.status || string(failed.Type()) != tt.kind || failed.RequestID == "" ||
					!strings.HasPrefix(failed.RawJSON(), `{"type":"error","error":{"type":`) {
					t.Errorf("%s: %v; want %d as %s with a request ID", what, err, tt.status, tt.kind)
				}
			}
			check("message", err)
			stream := client.Messages.NewStreaming(t.Context(), params, opts...)
			if stream.Next() {
				t.Errorf("a stream began with %s", stream.Current().RawJSON())
			}
			check("stream", stream.Err())
		})
	}
}

// failsWith is a front end over one worker that answers in a given way and is asked again at once.
func failsWith(t *testing.T, worker func(*conn, received), change func(*proxy.Config)) (*front, *script) {
	if worker == nil {
		worker = saying(answer(200, jsonHeader, reply))
	}
	s := newScript(t, worker)
	return begin(t, setup{proxy: func(c *proxy.Config) {
		c.MigrationLimit, c.InhibitedDuration = 0, 0
		change(c)
	}}, served("w", s)), s
}

// TestOpenAIErrors checks the same for applications of OpenAI's client, in either envelope.
func TestOpenAIErrors(t *testing.T) {
	for _, tt := range failures {
		for _, envelope := range []string{"flat", "openai"} {
			t.Run(fmt.Sprint(tt.status, envelope), func(t *testing.T) {
				f, _ := failsWith(t, tt.worker, func(c *proxy.Config) {
					c.ErrorEnvelope = envelope
					if tt.change != nil {
						tt.change(c)
					}
				})
				opts := []option.RequestOption{option.WithBaseURL(f.url + "/v1/"), option.WithAPIKey("sesame"), option.WithHTTPClient(f.client), option.WithMaxRetries(0)}
				if tt.contentType != "" {
					opts = append(opts, option.WithHeader("Content-Type", tt.contentType))
				}
				params := openai.ChatCompletionNewParams{Model: "m", Messages: []openai.ChatCompletionMessageParamUnion{openai.UserMessage("Hi")}}
				if tt.model != "" {
					params.Model = tt.model
				}
				switch tt.text {
				case "":
				case "-":
					params.Messages = []openai.ChatCompletionMessageParamUnion{}
				default:
					params.Messages = []openai.ChatCompletionMessageParamUnion{openai.UserMessage(tt.text)}
				}
				client := openai.NewClient(opts...)
				_, err := client.Chat.Completions.New(t.Context(), params)
				var failed *openai.Error
				if !errors.As(err, &failed) || failed.StatusCode != tt.status || (envelope == "openai") != (failed.Type != "" && failed.Message != "") {
					t.Errorf("chat: %v; want %d, with type and message in envelope openai", err, tt.status)
				}
				stream := client.Chat.Completions.NewStreaming(t.Context(), params)
				if stream.Next() {
					t.Errorf("a stream began with %s", stream.Current().RawJSON())
				}
				if !errors.As(stream.Err(), &failed) || failed.StatusCode != tt.status {
					t.Errorf("stream: %v; want %d", stream.Err(), tt.status)
				}
			})
		}
	}
}

// inEnvelope is an error body of Anthropic's API.
func inEnvelope(kind, text string) string {
	return fmt.Sprintf(`{"type":"error","error":{"type":%q,"message":%q}}`, kind, text)
}

// TestMessagesRoutes checks which paths speak Anthropic's dialect, and when.
func TestMessagesRoutes(t *testing.T) {
	s := newScript(t, saying(answer(200, jsonHeader, message)))
	f := begin(t, setup{proxy: withMessages}, served("w", s))
	for _, tt := range []struct {
		method, path string
		status       int
		body         string
	}{
		{"POST", "/v1/messages/nope", 404, inEnvelope("not_found_error", "No route for POST /v1/messages/nope")},
		{"GET", "/v1/messages/batches/x", 404, inEnvelope("not_found_error", "No route for GET /v1/messages/batches/x")},
		{"GET", "/v1/messages", 405, inEnvelope("api_error", "Method GET is not allowed on /v1/messages")},
		{"POST", "/v1/messagesx", 404, flat(404, "not_found", "No route for POST /v1/messagesx")},
		{"POST", "/v1/nope", 404, flat(404, "not_found", "No route for POST /v1/nope")},
	} {
		f.send(tt.method, tt.path, "").is(t, tt.method+" "+tt.path, tt.status, tt.body)
	}
	for body, want := range map[string]string{
		"{": "Validation: the request body is not valid JSON (near byte 1)", `{"model":"m"}`: "Validation: messages is required",
		`{"model":"m","messages":[]}`: "Validation: messages must be an array with at least one message",
	} {
		for _, path := range []string{"/v1/messages", "/v1/messages/count_tokens"} {
			f.send("POST", path, body).is(t, path+" "+body, 400, inEnvelope("invalid_request_error", want))
		}
	}
	own := begin(t, setup{proxy: func(c *proxy.Config) { withMessages(c); c.AnthropicPath = "/anthropic" }}, served("w", s))
	own.send("POST", "/anthropic", messageBody).is(t, "POST /anthropic", 200, message)
	if got := s.seen()[0].path; got != "/v1/messages" {
		t.Errorf("the worker got %s, want its own path", got)
	}
	own.send("POST", "/v1/messages", messageBody).is(t, "the usual path", 404, flat(404, "not_found", "No route for POST /v1/messages"))
	own.send("POST", "/anthropic/x", messageBody).is(t, "below the path", 404, inEnvelope("not_found_error", "No route for POST /anthropic/x"))
}

// TestMessagesStreams checks how streams of messages and responses end.
func TestMessagesStreams(t *testing.T) {
	const (
		created   = "event: response.created\n" + `data: {"type":"response.created","response":{"id":"r","status":"in_progress"}}` + "\n\n"
		delta     = "event: response.output_text.delta\n" + `data: {"type":"response.output_text.delta","delta":"Hello"}` + "\n\n"
		completed = "event: response.completed\n" + `data: {"type":"response.completed","response":{"id":"r","usage":{"input_tokens":5,"output_tokens":2}}}` + "\n\n"
		failedEnd = "event: response.failed\n" + `data: {"type":"response.failed","response":{"id":"r","error":{"code":"server_error"}}}` + "\n\n"
		overload  = "event: error\n" + `data: {"type":"error","error":{"type":"overloaded_error","message":"busy"}}` + "\n\n"
		brokeOff  = `{"message":"The worker broke off the stream","type":"internal_server_error","code":500}`
	)
	broken := "event: error\ndata: " + inEnvelope("api_error", "The worker broke off the stream") + "\n\n"
	for _, tt := range []struct {
		name, path, body string
		worker           func(*conn, received)
		status           int
		want             string
		kept             bool   // the connection is used again
		log              string // of the access record
	}{
		{"message", "/v1/messages", messageStream, streaming(messageStart, blockHello, messageDelta, messageStop), 200,
			messageStart + blockHello + messageDelta + messageStop, true, "output_tokens=7"},
		{"message and more", "/v1/messages", messageStream, streaming(messageStart, blockHello+messageStop+done), 200,
			messageStart + blockHello + messageStop, true, "status=200"},
		{"message without its end", "/v1/messages", messageStream, streaming(messageStart, blockHello, messageDelta), 200,
			messageStart + blockHello + messageDelta + broken, true, "error_type=internal"},
		{"message cut", "/v1/messages", messageStream, func(c *conn, _ received) { c.say(streamHead + chunk(messageStart)); c.reset() }, 200,
			messageStart + broken, false, "error_type=internal"},
		{"message with an error", "/v1/messages", messageStream, streaming(messageStart, blockHello, overload), 200,
			messageStart + blockHello + overload, true, "error_type=overload"},
		{"message with an error first", "/v1/messages", messageStream, streaming(overload), 503,
			inEnvelope("overloaded_error", "Service temporarily unavailable: All workers are busy, please retry later"), false, "reason=worker-overloaded"},
		{"response", "/v1/responses", `{"model":"m","input":"Hi","stream":true}`, streaming(created, delta+completed), 200,
			created + delta + completed, true, "output_tokens=2"},
		{"response and more", "/v1/responses", `{"model":"m","input":"Hi","stream":true}`, streaming(created, delta, completed, done), 200,
			created + delta + completed, true, "output_tokens=2"},
		{"response that failed", "/v1/responses", `{"model":"m","input":"Hi","stream":true}`, streaming(created, failedEnd), 200,
			created + failedEnd, true, "error_type=internal"},
		{"response without its end", "/v1/responses", `{"model":"m","input":"Hi","stream":true}`, streaming(created, delta, done), 200,
			created + delta + done + "event: error\n" + `data: {"type":"error","error":` + brokeOff + "}\n\n", true, "error_type=internal"},
		{"response, unary", "/v1/responses", `{"model":"m","input":"Hi"}`, saying(answer(200, jsonHeader, `{"id":"r","usage":{"input_tokens":5,"output_tokens":2},"user":null}`)), 200,
			`{"id":"r","usage":{"input_tokens":5,"output_tokens":2},"user":null}`, true, "prompt_tokens=5 output_tokens=2"},
		{"response without input", "/v1/responses", `{"model":"m"}`, nil, 400, flat(400, "bad_request", "Validation: input is required"), false, "status=400"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			log := &lines{}
			s := newScript(t, tt.worker)
			f := begin(t, setup{log: log.logger(), proxy: func(c *proxy.Config) {
				withMessages(c)
				c.InhibitedDuration, c.ForceIncludeUsage, c.StrictValidation = 0, true, true // the latter two are not for these
			}}, served("w", s))
			f.send("POST", tt.path, tt.body).is(t, tt.path, tt.status, tt.want)
			eventually(t, "the request is logged", func() bool { return strings.Contains(log.String(), "msg=request") })
			if !strings.Contains(log.String(), tt.log) {
				t.Errorf("logged %s, want %s", log, tt.log)
			}
			for _, r := range s.seen() {
				if r.path != tt.path || r.body != tt.body {
					t.Errorf("the worker got %s %s, want the client's words", r.path, r.body)
				}
			}
			if tt.kept {
				f.send("POST", tt.path, tt.body)
				if n, _ := s.connections(); n != 1 {
					t.Errorf("%d connections were made, want one that is kept", n)
				}
			}
		})
	}
}

// TestResponses uses the route through OpenAI's client.
func TestResponses(t *testing.T) {
	s := newScript(t, func(c *conn, r received) {
		const whole = `{"id":"r","object":"response","status":"completed","output":[{"type":"message","id":"o","role":"assistant","status":"completed","content":[{"type":"output_text","text":"Hello","annotations":[]}]}],"usage":{"input_tokens":5,"output_tokens":2,"total_tokens":7}}`
		if strings.Contains(r.body, `"stream":true`) {
			streaming(`data: {"type":"response.output_text.delta","delta":"Hello"}`+"\n\n", `data: {"type":"response.completed","response":`+whole+"}\n\n")(c, r)
			return
		}
		c.say(answer(200, jsonHeader, whole))
	})
	f := begin(t, setup{}, served("w", s))
	client := openai.NewClient(option.WithBaseURL(f.url+"/v1/"), option.WithAPIKey("any"), option.WithHTTPClient(f.client), option.WithMaxRetries(0))
	params := responses.ResponseNewParams{Model: "m", Input: responses.ResponseNewParamsInputUnion{OfString: openai.String("Hi")}}
	r, err := client.Responses.New(t.Context(), params)
	if err != nil || r.OutputText() != "Hello" || r.Usage.OutputTokens != 2 {
		t.Errorf("response = %+v, %v", r, err)
	}
	stream, text, end := client.Responses.NewStreaming(t.Context(), params), "", ""
	for stream.Next() {
		text += stream.Current().Delta
		end = stream.Current().Type
	}
	if err := stream.Err(); err != nil || text != "Hello" || end != "response.completed" {
		t.Errorf("stream = %q to %s, %v", text, end, err)
	}
	_, err = client.Responses.New(t.Context(), responses.ResponseNewParams{Model: "nope", Input: params.Input})
	if failed := (*openai.Error)(nil); !errors.As(err, &failed) || failed.StatusCode != 404 {
		t.Errorf("unknown model: %v, want 404", err)
	}
}

// TestCountTokens checks that counting finds a worker whatever its load, and tries another one.
func TestCountTokens(t *testing.T) {
	a := newScript(t, func(c *conn, _ received) { c.reset() })
	b := newScript(t, saying(answer(200, jsonHeader, `{"input_tokens":12}`)))
	f := begin(t, setup{busy: limited(0), proxy: withMessages}, served("a", a), served("b", b))
	for range 10 {
		f.send("POST", "/v1/messages/count_tokens", messageBody).is(t, "count", 200, `{"input_tokens":12}`)
	}
	for _, tt := range []struct {
		answer func(*conn, received)
		status int
		body   string
	}{
		{saying(answer(400, jsonHeader, `{"own":"words"}`)), 400, `{"own":"words"}`},
		{saying(answer(500, jsonHeader, `{"own":"words"}`)), 500, inEnvelope("api_error", "The worker failed to process the request")},
		{saying(answer(302, "", "")), 502, inEnvelope("api_error", "The worker could not be reached or broke the connection")},
		{saying(answer(200, "", strings.Repeat("x", 2<<20))), 502, inEnvelope("api_error", "The worker could not be reached or broke the connection")},
	} {
		s := newScript(t, tt.answer)
		f := begin(t, setup{models: []string{"empty"}, proxy: withMessages}, served("w", s))
		f.send("POST", "/v1/messages/count_tokens", messageBody).is(t, "count", tt.status, tt.body)
		f.send("POST", "/v1/messages/count_tokens", strings.Replace(messageBody, `"m"`, `"empty"`, 1)).is(t, "count without workers", http.StatusServiceUnavailable,
			inEnvelope("overloaded_error", "Service temporarily unavailable: No workers available for model empty"))
	}
}
