package wire

// kvMedium is where a block is, as its event says.
type kvMedium uint8

const (
	onDevice kvMedium = iota
	onHost
	onDisk
	onExternal
	onUnknown
)

func readMedium(c *cursor, e *kvRaw) bool {
	text, ok := optionalText(c)
	switch string(text) {
	case "", "GPU", "DEVICE":
		e.medium = onDevice
	case "CPU", "CPU_PINNED", "CPU_TIER1":
		e.medium = onHost
	case "CPU_TIER2", "DISK", "NVME", "STORAGE":
		e.medium = onDisk
	case "EXTERNAL", "NETWORK", "REMOTE", "SHARED":
		e.medium = onExternal
	default:
		e.medium = onUnknown
	}
	return ok
}

// kvAttention is what kind of attention a block is for. Only blocks of main attention make a
// prefix that can be looked for.
type kvAttention uint8

const (
	unsaidAttention kvAttention = iota
	mainAttention
	otherAttention
	unknownAttention
)

func attentionOf(word []byte) kvAttention {
	switch string(word) {
	case "full_attention", "mla_attention", "sink_full_attention":
		return mainAttention
	case "sliding_window", "sliding_window_mla", "mamba", "chunked_local_attention",
		"encoder_only_attention", "cross_attention":
		return otherAttention
	}
	return unknownAttention
}

func readAttention(c *cursor, e *kvRaw) bool {
	e.attention = unsaidAttention
	if c.null() {
		return true
	}
	word, ok := c.text()
	e.attention = attentionOf(word)
	return ok
}

// kvOwner is who keeps a block. Blocks of another tier than the engine's own are not its events'
// to tell.
type kvOwner uint8

const (
	ownedByEngine kvOwner = iota
	ownedBySecondTier
	ownedByUnknown
)

func ownerOf(word []byte) kvOwner {
	switch string(word) {
	case "":
		return ownedByEngine
	case "kvcr":
		return ownedBySecondTier
	}
	return ownedByUnknown
}

func readOwner(c *cursor, e *kvRaw) bool {
	word, ok := optionalText(c)
	e.owner = ownerOf(word)
	return ok
}

func readLocality(c *cursor, e *kvRaw) bool {
	e.remote = false
	if c.null() {
		return true
	}
	word, ok := c.text()
	e.remote = string(word) != "LOCAL"
	return ok
}

// kvPlace is one value of the places at the end of an event.
type kvPlace struct {
	kind byte // n for nil, u for a number of 32 bits, s for text, l for a list, and 0
	num  uint32
	text []byte
}

// readTail reads the n places at the end of an event. The engine's releases agree on what they
// hold, but not on where: five places [group, attention, window, locality, owner] in the newest,
// before that any of list of media, group, attention and window. A list's begin goes to media,
// unless that is nil.
func readTail(c *cursor, n int, e *kvRaw, media *int) bool {
	const most = 5
	var places [most]kvPlace
	held := min(n, most)
	list := 0
	for i := range places[:held] {
		p := &places[i]
		begin := c.at
		switch ok := true; {
		case c.null():
			p.kind = 'n'
			continue
		case c.isText():
			p.kind = 's'
			if p.text, ok = c.text(); !ok {
				return false
			}
			continue
		case c.isArray():
			p.kind = 'l'
			if list == 0 {
				list = begin
			}
		default:
			if p.num, ok = c.uint32(); ok {
				p.kind = 'u'
				continue
			}
			c.at = begin
		}
		if !c.skip(levels) {
			return false
		}
	}
	if fixedTail(places[:held]) {
		e.setTail(&places)
	} else {
		e.guessTail(places[:held])
		if media != nil {
			*media = list
		}
	}
	return c.skipAll(n-held, levels)
}

// fixedTail tells whether places fit the newest layout.
func fixedTail(places []kvPlace) bool {
	if len(places) < 4 {
		return false
	}
	for i, p := range places {
		if p.kind != 'n' && p.kind != "ususs"[i] {
			return false
		}
	}
	return true
}

// setTail takes the places of the newest layout; those that did not come are of kind 0.
func (e *kvRaw) setTail(places *[5]kvPlace) {
	if p := places[0]; p.kind == 'u' {
		e.group, e.hasGroup = p.num, true
	}
	if p := places[1]; p.kind == 's' {
		e.attention = attentionOf(p.text)
	}
	if p := places[3]; p.kind == 's' {
		e.remote = string(p.text) != "LOCAL"
	}
	if p := places[4]; p.kind == 's' {
		e.owner = ownerOf(p.text)
	}
}

// guessTail takes the first number for the group and the first text for the attention.
func (e *kvRaw) guessTail(places []kvPlace) {
	for _, p := range places {
		switch {
		case p.kind == 'u' && !e.hasGroup:
			e.group, e.hasGroup = p.num, true
		case p.kind == 's' && e.attention == unsaidAttention:
			e.attention = attentionOf(p.text)
		}
	}
}
