package wire_test

import (
	"math"
	"slices"
	"strings"
	"testing"
)

// TestKVFields is the event encodings of 1.4 and the field rules of 1.5.
func TestKVFields(t *testing.T) {
	digest := make([]byte, 32)
	for i := range digest {
		digest[i] = byte(i)
	}
	image := "0123456789abcdef" + strings.Repeat("0", 48)
	infos := list{fields{"mm_objects": list{fields{"mm_hash": 42, "offsets": list{list{0, 1}}}}}}
	for _, tt := range []struct {
		name, want string
		events     list
	}{
		{"hash of -1", "--1", list{removed(-1)}},
		{"largest hash", "--1", list{removedList(list{uint64(math.MaxUint64)})}},
		{"signed hash", "--9223372036854775808", list{removedList(list{int64(math.MinInt64)})}},
		{"small signed hashes", "--2,--200,--70000", list{removedList(list{-2, -200, -70000})}},
		{"digest", "-1736447835066146335", list{removedList(list{digest})}},
		{"short digest", "-258", list{removedList(list{[]byte{1, 2}})}},
		{"parent as digest", "258>11=x", list{stored(list{11}, []byte{1, 2}, tokensX)}},
		{"negative parent", "-1>11=x", list{stored(list{11}, -1, tokensX)}},
		{"parent", "7>11=x,12=y", list{stored(list{11, 12}, 7, tokensXY)}},
		{"parent 0 that nobody has stored", "11=x", list{stored(list{11}, 0, tokensX)}},
		{"parent 0 that was stored", "0=x 0>11=x", list{stored(list{0}, nil, tokensX), stored(list{11}, 0, tokensX)}},
		{"parent 0 after a clear", "0=x clear 11=x",
			list{stored(list{0}, nil, tokensX), list{"AllBlocksCleared"}, stored(list{11}, 0, tokensX)}},
		{"pairs", "11=eagle0,12=eagle1",
			list{stored(list{11, 12}, nil, list{list{10, 11}, list{11, 12}, list{12, 13}, list{13, 14}})}},
		{"pairs, too few", "11=eagle0 short_tokens=1",
			list{stored(list{11, 12}, nil, list{list{10, 11}, list{11, 12}})}},
		{"no tokens", "nothing short_tokens=1", list{stored(list{11}, nil, list{})}},
		{"no blocks", "nothing", list{stored(list{}, nil, list{})}},
		{"more tokens than blocks", "11=x", list{stored(list{11}, nil, tokensXY)}},
		{"fewer tokens than blocks", "11=x,12=y short_tokens=1", list{stored(list{11, 12, 13}, nil, tokensXY)}},
		{"other size", "nothing block_size_mismatch=1", list{list{"BlockStored", list{11}, nil, tokensXY, 4}}},
		{"size 0 and no tokens", "host_pinned:nothing placeholder=1", list{list{"BlockStored", list{11}, nil, list{}, 0, nil, "CPU"}}},
		{"huge size", "nothing block_size_mismatch=1", list{list{"BlockStored", list{11}, nil, tokensX, uint64(1<<32 + 2)}}},
		{"hash twice", "self_reference=1", list{stored(list{11, 11}, nil, tokensXY)}},
		{"parent among the blocks", "self_reference=1", list{stored(list{12, 11}, 11, tokensXY)}},
		{"hash twice among many", "self_reference=1", list{stored(append(upTo(300), 7), nil, tokensXY)}},
		{"many hashes", "1=x,2=y short_tokens=1", list{stored(upTo(300), nil, tokensXY)}},

		{"adapter", "11=x+ada", list{stored(list{11}, nil, tokensX, 3, "GPU", "ada")}},
		{"number of an adapter", "11=x", list{stored(list{11}, nil, tokensX, 3, "GPU", nil)}},
		{"empty adapter", "11=x", list{stored(list{11}, nil, tokensX, 3, "GPU", "")}},
		{"metadata", "11=x/a", list{stored(list{11}, nil, tokensX, nil, "GPU", fields{"cache_salt": "a", "other": list{1}})}},
		{"metadata in a map", "11=x/a", list{with(fields{"metadata": fields{"cache_salt": "a"}})}},
		{"salt", "11=x/a", list{with(fields{"cache_salt": "a", "session_id": 3})}},
		{"salt before metadata", "11=x/a", list{with(fields{"cache_salt": "a", "metadata": fields{"cache_salt": "b"}})}},
		{"empty salt", "11=x", list{with(fields{"cache_salt": ""})}},
		{"salt and adapter", "11=x+ada/a", list{with(fields{"cache_salt": "a", "lora_name": "ada"})}},

		{"tagged salt", "11=x/a,12=y/a",
			list{stored(list{11, 12}, nil, tokensXY, nil, "GPU", nil, list{list{"dynamo-cache-salt:a"}, nil})}},
		{"tagged salt beside others", "11=x/a",
			list{with(fields{"extra_keys": list{list{1, true, 1.5, []byte{1}, nil, "bare", list{"img", 3}, "dynamo-cache-salt:a", "dynamo-cache-salt:b"}}})}},
		{"tag without salt", "11=x", list{with(fields{"extra_keys": list{list{"dynamo-cache-salt:"}}})}},
		{"tagged salt of another block", "11=x", list{with(fields{"extra_keys": list{nil, list{"dynamo-cache-salt:a"}}})}},
		{"bare salt", "11=x", list{with(fields{"extra_keys": list{list{"a"}}})}},
		{"salt before a tagged one", "11=x/a", list{with(fields{"cache_salt": "a", "extra_keys": list{list{"dynamo-cache-salt:b"}}})}},
		{"adapter among the keys", "11=x+ada/a",
			list{with(fields{"lora_name": "ada", "extra_keys": list{list{"ada", "dynamo-cache-salt:a"}}})}},
		{"adapter that looks like a salt", "11=x+dynamo-cache-salt:a",
			list{with(fields{"lora_name": "dynamo-cache-salt:a", "extra_keys": list{list{"dynamo-cache-salt:a"}}})}},
		{"adapter that looks like a salt, and a salt", "11=x+dynamo-cache-salt:a/a",
			list{with(fields{"lora_name": "dynamo-cache-salt:a", "extra_keys": list{list{"dynamo-cache-salt:a", "dynamo-cache-salt:a"}}})}},

		{"image, bare", "11=x[123456789abcdef]", list{with(fields{"extra_keys": list{list{image}}})}},
		{"image in a pair", "11=x[123456789abcdef],12=y",
			list{stored(list{11, 12}, nil, tokensXY, nil, "GPU", nil, list{list{list{image, 5}}, nil})}},
		{"image of the second block", "11=x,12=y[123456789abcdef]",
			list{stored(list{11, 12}, nil, tokensXY, nil, "GPU", nil, list{nil, list{image}})}},
		{"not quite an image", "11=x", list{with(fields{"extra_keys": list{list{image[1:], "g" + image[1:], list{}, list{7}}}})}},
		{"media", "11=x[2a]", list{with(fields{"block_mm_infos": infos})}},
		{"media in places", "11=x[2a]", list{with(fields{"block_mm_infos": list{list{list{list{42, list{list{0, 1}}}}}}})}},
		{"two media", "11=x[2a 2b]",
			list{with(fields{"block_mm_infos": list{fields{"mm_objects": list{fields{"mm_hash": 43}, fields{"mm_hash": 42}}}}})}},
		{"media before images", "11=x[2a]", list{with(fields{"block_mm_infos": infos, "extra_keys": list{list{image}}})}},
		{"media of no block", "11=x", list{with(fields{"block_mm_infos": list{nil, nil}})}},
		{"media of the second block", "11=x,12=y[2a]",
			list{stored(list{11, 12}, nil, tokensXY, nil, "GPU", nil, nil, list{nil, infos[0]})}},
		{"surplus of a clear", "clear", list{list{"AllBlocksCleared", nil, 7, "x"}}},
		{"clear as a map", "clear", list{fields{"type": "AllBlocksCleared", "medium": "nowhere", "block_hashes": 7}}},
		{"surplus of a remove", "-11", list{fields{"type": "BlockRemoved", "block_hashes": list{11}, "token_ids": "x", "parent_block_hash": "y"}}},
	} {
		if got := play(t, batch(tt.events...)); got != tt.want {
			t.Errorf("%s: %q, want %q", tt.name, got, tt.want)
		}
	}
}

// upTo lists 1 to n.
func upTo(n int) list {
	var all list
	for i := range n {
		all = append(all, i+1)
	}
	return all
}

// TestKVMedia is 1.6.
func TestKVMedia(t *testing.T) {
	for medium, want := range map[string]string{
		"": "", "GPU": "", "DEVICE": "",
		"CPU": "host_pinned:", "CPU_PINNED": "host_pinned:", "CPU_TIER1": "host_pinned:",
		"CPU_TIER2": "disk:", "DISK": "disk:", "NVME": "disk:", "STORAGE": "disk:",
		"EXTERNAL": "external:", "NETWORK": "external:", "REMOTE": "external:", "SHARED": "external:",
	} {
		got := play(t, batch(stored(list{11}, nil, tokensX, nil, medium), removed(11, medium)))
		if want := want + "11=x " + want + "-11"; got != want {
			t.Errorf("%q: %q, want %q", medium, got, want)
		}
	}
	for _, medium := range []string{"FS", "OBJ", "gpu", "cpu", "Disk", "GPU ", "TAPE"} {
		got := play(t, batch(stored(list{11}, nil, tokensX, nil, medium), removed(11, medium)))
		if want := "unknown_medium=2"; got != want {
			t.Errorf("%q: %q, want %q", medium, got, want)
		}
	}
}

// TestKVTail is the table of tails in 1.4. What a tail says shows in what happens to the event,
// and to a remove of group 3 after it.
func TestKVTail(t *testing.T) {
	const (
		full, mamba = "full_attention", "mamba"
		kept        = "11=x -11"                   // of group 3 or none, and it has taught
		alone       = "11=x unlearned_group_idx=1" // kept, and it has taught nothing
		unlearned   = "unlearned_group_idx=2"      // of a group that is not 0, without kind
		taught      = "non_main_attention_group=1" // of group 3, whose kind is another
		dropped     = "non_main_attention_kind=1 " // and why
		nobody      = "unlearned_group_idx=1"      // the remove
	)
	infos := list{fields{"mm_objects": list{fields{"mm_hash": 42}}}}
	withMedia := func(s string) string { return strings.Replace(s, "x", "x[2a]", 1) }
	for _, tt := range []struct {
		name string
		tail list
		want string
	}{
		{"group", list{3}, unlearned},
		{"group 0", list{0}, alone},
		{"group and kind", list{3, full}, kept},
		{"kind", list{full}, alone},
		{"nil and kind", list{nil, full}, alone},
		{"other kind", list{3, mamba}, dropped + taught},
		{"media, group, kind", list{infos, 3, full}, withMedia(kept)},
		{"media, group, kind, window, text", list{infos, 3, full, 7, "REMOTE"}, withMedia(kept)},
		{"does not fit", list{nil, 3, full, true}, kept},
		{"does not fit, nor is REMOTE read", list{3, full, nil, "REMOTE", 1}, kept},
		{"fixed, sixth ignored", list{3, full, nil, nil, nil, true}, kept},
		{"fixed, sixth is a list", list{3, full, nil, nil, nil, infos}, kept},
		{"fixed, local", list{3, full, nil, "LOCAL"}, kept},
		{"fixed, remote", list{3, full, nil, "REMOTE"}, "non_local_locality=1 " + nobody},
		{"fixed, somewhere", list{3, full, nil, "local"}, "non_local_locality=1 " + nobody},
		{"fixed, window", list{3, full, 128, nil}, kept},
		{"fixed, owner", list{nil, full, nil, "LOCAL", "kvcr"}, "unsupported_ownership=1 " + nobody},
		{"fixed, other owner", list{nil, full, nil, "LOCAL", "who"}, "unknown_ownership=1 " + nobody},
		{"fixed, no owner", list{3, full, nil, nil, ""}, kept},
		{"three are legacy", list{nil, full, 3}, kept},
		{"four are fixed", list{nil, full, 3, nil}, alone},
		{"three that do not fit", list{full, 3, "REMOTE"}, kept},
		{"group of 33 bits", list{uint64(1 << 32), 3, full}, kept},
		{"group of 33 bits does not fit", list{uint64(1 << 32), full, 3, "REMOTE"}, kept},
		{"negative number", list{-1, 3, full}, kept},
		{"second number", list{3, 4, full}, kept},
	} {
		event := stored(list{11}, nil, tokensX, append(list{nil, nil, nil, nil}, tt.tail...)...)
		got := play(t, batch(event, ofGroup(3, nil)))
		if g, w := strings.Fields(got), strings.Fields(tt.want); !sameWords(g, w) {
			t.Errorf("%s: %q, want %q", tt.name, got, tt.want)
		}
	}
	for _, tt := range []struct {
		name string
		tail list
		want string
	}{
		{"group", list{0}, "-11"},
		{"other group", list{3}, "unlearned_group_idx=1"},
		{"kind", list{3, full}, "-11"},
		{"list is skipped", list{infos, 3, full}, "-11"},
		{"fixed", list{3, full, nil, "REMOTE"}, "non_local_locality=1"},
		{"owner", list{3, full, nil, nil, "kvcr"}, "unsupported_ownership=1"},
		{"surplus", list{3, full, nil, nil, nil, 7}, "-11"},
	} {
		if got := play(t, batch(removed(11, append(list{nil}, tt.tail...)...))); got != tt.want {
			t.Errorf("remove, %s: %q, want %q", tt.name, got, tt.want)
		}
	}
}

func sameWords(a, b []string) bool {
	slices.Sort(a)
	slices.Sort(b)
	return slices.Equal(a, b)
}
