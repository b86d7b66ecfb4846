package sim

import (
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"math"
	"net/http"
)

const (
	embeddingSize    = 64
	maxEmbeddingSize = 8192
)

// embeddings serves POST /v1/embeddings: the work is the prefill alone.
func (w *worker) embeddings(rw http.ResponseWriter, r *http.Request) error {
	var req struct {
		Model          string          `json:"model"`
		Input          json.RawMessage `json:"input"`
		Dimensions     *int            `json:"dimensions"`
		EncodingFormat string          `json:"encoding_format"`
		Priority       int             `json:"priority"`
	}
	if err := readBody(rw, r, &req); err != nil {
		return err
	}
	if err := w.checkModel(req.Model); err != nil {
		return err
	}
	size := embeddingSize
	if req.Dimensions != nil {
		size = *req.Dimensions
	}
	switch {
	case size < 1 || size > maxEmbeddingSize:
		return badRequest("dimensions must be within 1..%d, got %d.", maxEmbeddingSize, size)
	case req.EncodingFormat != "" && req.EncodingFormat != "float" && req.EncodingFormat != "base64":
		return badRequest("encoding_format must be float or base64, got %.20q.", req.EncodingFormat)
	}
	prompts, err := parsePrompts(req.Input)
	if err != nil {
		return err
	}
	for _, p := range prompts {
		if limit := w.server.cfg.MaxModelLen; len(p) > limit {
			return badRequest("This model's maximum context length is %d tokens. However, you requested %d tokens "+
				"in the input for embedding generation. Please reduce the length of the input.", limit, len(p))
		}
	}
	rank, err := w.rankHeader(r)
	if err != nil {
		return err
	}
	c := w.newCall(r, "embd-", &generation{Priority: req.Priority})
	defer c.close()
	for _, p := range prompts {
		if err := c.start(p, 1, 0, rank, false); err != nil {
			return err
		}
	}
	if err := c.wait(r.Context()); err != nil {
		return err
	}
	if err := writeJSON(rw, http.StatusOK, c.vectors(size, req.EncodingFormat == "base64")); err != nil {
		return err
	}
	c.whole = true
	return nil
}

// vectors is the body of an answer with an embedding per choice.
func (c *call) vectors(size int, packed bool) any {
	type one struct {
		Index     int    `json:"index"`
		Object    string `json:"object"`
		Embedding any    `json:"embedding"`
	}
	data := make([]one, len(c.choices))
	for i, ch := range c.choices {
		data[i] = one{i, "embedding", ch.text.vector(size)}
		if packed {
			var raw []byte
			for _, v := range ch.text.vector(size) {
				raw = binary.LittleEndian.AppendUint32(raw, math.Float32bits(v))
			}
			data[i].Embedding = base64.StdEncoding.EncodeToString(raw)
		}
	}
	return struct {
		ID      string `json:"id"`
		Object  string `json:"object"`
		Created int64  `json:"created"`
		Model   string `json:"model"`
		Data    []one  `json:"data"`
		Usage   usage  `json:"usage"`
	}{c.id, "list", c.created, c.worker.server.cfg.Model, data, c.usage()}
}

// vector is a unit vector that depends on the seed alone.
func (w words) vector(size int) []float32 {
	v := make([]float32, size)
	sum := 0.0
	for i := range v {
		x := float64(int32(mix(uint64(w)+uint64(i)))) / (1 << 31)
		v[i] = float32(x)
		sum += x * x
	}
	if sum == 0 {
		return v
	}
	for i := range v {
		v[i] /= float32(math.Sqrt(sum))
	}
	return v
}
