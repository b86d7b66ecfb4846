package service

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"

	"spillway/httperr"
	"spillway/jsonhttp"
)

// maxPeers bounds the list of peers.
const maxPeers = 256

// peers are the processes to recover from at start-up. Later changes are remembered and told, and
// nothing else: peers are not used again.
type peers struct {
	mu   sync.Mutex // guards list
	list []string
}

func (s *Server) listPeers(w http.ResponseWriter, _ *http.Request) *httperr.Error {
	s.peers.mu.Lock()
	list := slices.Clone(s.peers.list)
	s.peers.mu.Unlock()
	b := []byte{'['}
	for i, peer := range list {
		if i > 0 {
			b = append(b, ',')
		}
		b = jsonhttp.AppendText(b, peer)
	}
	jsonhttp.Send(w, http.StatusOK, append(b, ']'))
	return nil
}

func (s *Server) registerPeer(x *exchange) (int, *httperr.Error) {
	base := strings.TrimRight(strings.TrimSpace(x.url), "/")
	if err := s.link.CheckPeer(base); err != nil {
		return 0, httperr.New(http.StatusBadRequest, "url: "+err.Error())
	}
	s.peers.mu.Lock()
	defer s.peers.mu.Unlock()
	switch {
	case slices.Contains(s.peers.list, base):
	case len(s.peers.list) >= maxPeers:
		return 0, httperr.New(http.StatusConflict, fmt.Sprintf("url: there are %d peers already", maxPeers))
	default:
		s.peers.list = append(s.peers.list, base)
	}
	return http.StatusCreated, nil
}

func (s *Server) deregisterPeer(x *exchange) (int, *httperr.Error) {
	base := strings.TrimRight(strings.TrimSpace(x.url), "/")
	s.peers.mu.Lock()
	defer s.peers.mu.Unlock()
	at := slices.Index(s.peers.list, base)
	if at < 0 {
		return 0, httperr.New(http.StatusNotFound, fmt.Sprintf("url: %.256q is no peer", base))
	}
	s.peers.list = slices.Delete(s.peers.list, at, at+1)
	return http.StatusOK, nil
}
