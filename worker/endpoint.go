package worker

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// CheckEventEndpoint tells what is wrong with the endpoint of an engine's KV events or of its
// replay socket, in words that name it. Allowed are tcp://host:port, where * as host means that we
// bind and the engine connects, ipc://path and inproc://name.
func CheckEventEndpoint(endpoint string) error {
	if err := checkEventEndpoint(endpoint); err != nil {
		return fmt.Errorf("%.256q: %w", endpoint, err)
	}
	return nil
}

func checkEventEndpoint(endpoint string) error {
	scheme, address, ok := strings.Cut(endpoint, "://")
	switch {
	case !ok:
		return errors.New("missing scheme")
	case address == "":
		return errors.New("missing address")
	case scheme != "tcp" && scheme != "ipc" && scheme != "inproc":
		return fmt.Errorf("unsupported scheme %.32q: it is none of tcp, ipc and inproc", scheme)
	case strings.IndexByte(endpoint, 0) >= 0:
		return errors.New("a zero byte") // where libzmq would stop reading
	case scheme != "tcp":
		return nil
	}
	host, port, ok := cutPort(address)
	if !ok {
		return errors.New("missing TCP port")
	}
	if _, err := strconv.ParseUint(port, 10, 16); err != nil {
		return fmt.Errorf("invalid TCP port %.32q", port)
	}
	switch {
	case host == "":
		return errors.New("missing TCP host")
	case host[0] == '[' && !strings.HasSuffix(host, "]"):
		return errors.New("missing closing `]`")
	case host[0] != '[' && strings.Contains(host, ":"):
		return errors.New("missing TCP port: an IPv6 address needs brackets")
	}
	return nil
}

// cutPort cuts an address at its last colon.
func cutPort(address string) (host, port string, ok bool) {
	at := strings.LastIndexByte(address, ':')
	if at < 0 {
		return "", "", false
	}
	return address[:at], address[at+1:], true
}

// Binds tells whether a valid endpoint is one that we bind, because its host is *.
func Binds(endpoint string) bool { return strings.HasPrefix(endpoint, "tcp://*:") }

// ReplayEndpoint is where rank start+offset replays its KV events if that of rank start does at
// endpoint, which is valid: engines open one socket for each rank, on consecutive ports. It fails
// where there is no such port, and for ipc, which has no convention.
func ReplayEndpoint(endpoint string, offset uint32) (string, error) {
	if offset == 0 {
		return endpoint, nil
	}
	scheme, address, _ := strings.Cut(endpoint, "://")
	switch scheme {
	case "inproc":
		return endpoint + "_dp" + strconv.FormatUint(uint64(offset), 10), nil
	case "tcp":
		host, port, _ := cutPort(address)
		first, err := strconv.ParseUint(port, 10, 16)
		if at := first + uint64(offset); err == nil && first > 0 && at <= 65535 {
			return "tcp://" + host + ":" + strconv.FormatUint(at, 10), nil
		}
	}
	return "", fmt.Errorf("%.256q: there is no endpoint for the rank %d after the first", endpoint, offset)
}

// normalizeKVEndpoints puts what is said of all ranks into the maps, and checks these. The error
// begins with the key.
func (w Worker) normalizeKVEndpoints() (Worker, error) {
	if err := checkReplayEndpoint(w.ReplayEndpoint); err != nil {
		return w, fmt.Errorf("replay_endpoint: %w", err)
	}
	if len(w.KVEvents) == 0 && w.KVEventsEndpoint != "" && w.DPSize <= 1 {
		if err := CheckEventEndpoint(w.KVEventsEndpoint); err != nil {
			return w, fmt.Errorf("kv_events_endpoint: %w", err)
		}
		w.KVEvents = map[uint32]string{w.DPStart: w.KVEventsEndpoint}
	}
	for _, by := range []struct {
		key   string
		ranks map[uint32]string
		check func(string) error
	}{{"kv_events_endpoints", w.KVEvents, CheckEventEndpoint}, {"replay_endpoints", w.KVReplay, checkReplayEndpoint}} {
		if len(by.ranks) > MaxDPSize {
			return w, fmt.Errorf("%s: %d ranks are more than %d", by.key, len(by.ranks), MaxDPSize)
		}
		for _, dp := range slices.Sorted(maps.Keys(by.ranks)) {
			if dp == AnyDP {
				return w, fmt.Errorf("%s: %d is no rank", by.key, dp)
			}
			if err := by.check(by.ranks[dp]); err != nil {
				return w, fmt.Errorf("%s: %w", by.key, err)
			}
		}
	}
	if w.ReplayEndpoint != "" {
		replay := maps.Clone(w.KVReplay)
		for dp := range w.KVEvents {
			if _, said := replay[dp]; said || dp < w.DPStart {
				continue
			}
			if at, err := ReplayEndpoint(w.ReplayEndpoint, dp-w.DPStart); err == nil { // else no convention tells of one
				if replay == nil {
					replay = map[uint32]string{}
				}
				replay[dp] = at
			}
		}
		w.KVReplay = replay
	}
	w.KVEventsEndpoint, w.ReplayEndpoint = "", ""
	return w, nil
}

// checkReplayEndpoint is CheckEventEndpoint for one to ask at, or "" for none.
func checkReplayEndpoint(endpoint string) error {
	if endpoint == "" {
		return nil
	}
	if Binds(endpoint) {
		return fmt.Errorf("%.256q: nobody can be asked at *", endpoint)
	}
	return CheckEventEndpoint(endpoint)
}
