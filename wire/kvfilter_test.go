package wire_test

import (
	"fmt"
	"testing"

	"spillway/wire"
	"spillway/worker"
)

// TestKVFilter is the pipeline of 1.7.
func TestKVFilter(t *testing.T) {
	kind := func(group any, word string) fields { return fields{"group_idx": group, "kv_cache_spec_kind": word} }
	for _, tt := range []struct {
		name, want string
		events     list
	}{
		{"remove of a group nobody has taught", "unlearned_group_idx=1", list{ofGroup(1, nil)}},
		{"store of group 0", "11=x", list{with(fields{"group_idx": 0})}},
		{"store teaches", "11=x -11", list{with(kind(3, "full_attention")), ofGroup(3, nil)}},
		{"remove does not teach", "-11 unlearned_group_idx=1", list{ofGroup(3, kind(3, "full_attention")), ofGroup(3, nil)}},
		{"other kind of group 0", "non_main_attention_kind=1 non_main_attention_group=1", list{with(kind(0, "mamba")), ofGroup(0, nil)}},
		{"unknown kind", "unknown_kind=2", list{with(kind(0, "telepathy")), ofGroup(0, nil)}},
		{"kind changes", "11=x non_main_attention_kind=1 non_main_attention_group=1",
			list{with(kind(3, "full_attention")), with(kind(3, "mamba")), ofGroup(3, nil)}},
		{"neither", "11=x", list{with(nil)}},
		{"MLA", "11=x", list{with(kind(nil, "mla_attention"))}},
		{"sink", "11=x", list{with(kind(nil, "sink_full_attention"))}},
		{"sliding", "non_main_attention_kind=1", list{with(kind(nil, "sliding_window"))}},
		{"sliding MLA", "non_main_attention_kind=1", list{with(kind(nil, "sliding_window_mla"))}},
		{"chunked", "non_main_attention_kind=1", list{with(kind(nil, "chunked_local_attention"))}},
		{"encoder", "non_main_attention_kind=1", list{with(kind(nil, "encoder_only_attention"))}},
		{"cross", "non_main_attention_kind=1", list{with(kind(nil, "cross_attention"))}},

		{"ignored", "ignored_event=2", list{fields{"type": "Ignored"}, list{"Ignored", 1}}},
		{"owner before ignored", "unsupported_ownership=1", list{fields{"type": "Ignored", "ownership": "kvcr"}}},
		{"owner of a clear", "unsupported_ownership=1 unknown_ownership=1",
			list{list{"AllBlocksCleared", "kvcr"}, fields{"type": "AllBlocksCleared", "ownership": "who"}}},
		{"owner before locality", "unknown_ownership=1", list{with(fields{"ownership": "who", "locality": "REMOTE"})}},
		{"locality before medium", "non_local_locality=1", list{with(fields{"locality": "REMOTE", "medium": "TAPE"})}},
		{"medium before group", "unknown_medium=1", list{with(fields{"medium": "TAPE", "group_idx": 3})}},
		{"local", "11=x", list{with(fields{"locality": "LOCAL"})}},
		{"nil locality", "11=x", list{with(fields{"locality": nil})}},
		{"locality unknown", "non_local_locality=1", list{with(fields{"locality": "local"})}},
		{"disk skips the group", "disk:11=x", list{with(fields{"medium": "DISK", "group_idx": 3})}},
		{"external skips the kind", "external:11=x", list{with(fields{"medium": "SHARED", "kv_cache_spec_kind": "mamba"})}},
		{"disk does not teach", "disk:11=x unlearned_group_idx=1",
			list{with(fields{"medium": "DISK", "group_idx": 3, "kv_cache_spec_kind": "full_attention"}), ofGroup(3, nil)}},
		{"host is filtered too", "non_main_attention_kind=1", list{with(fields{"medium": "CPU", "kv_cache_spec_kind": "mamba"})}},
	} {
		if got := play(t, batch(tt.events...)); got != tt.want {
			t.Errorf("%s: %q, want %q", tt.name, got, tt.want)
		}
	}
	teach := batch(with(kind(3, "full_attention")))
	if got, want := play(t, teach, pack(list{1.5, list{ofGroup(3, nil)}, 1})), "11=x unlearned_group_idx=1"; got != want {
		t.Errorf("remove of another rank: %q, want %q", got, want)
	}
	if got, want := play(t, teach, batch(ofGroup(3, nil))), "11=x -11"; got != want {
		t.Errorf("remove of the next batch: %q, want %q", got, want)
	}
}

// TestKVSalts is 1.8.
func TestKVSalts(t *testing.T) {
	const gpu, cpu, storage = "GPU", "CPU", "STORAGE"
	clear := list{"AllBlocksCleared"}
	for _, tt := range []struct {
		name, want string
		events     list
	}{
		{"inherited", "1=x/a 1>2=x/a", list{salted(1, nil, "a", gpu), salted(2, 1, nil, gpu)}},
		{"inherited twice", "1=x/a 1>2=x/a 2>3=x/a", list{salted(1, nil, "a", gpu), salted(2, 1, nil, gpu), salted(3, 2, nil, gpu)}},
		{"empty is none", "1=x/a 1>2=x/a", list{salted(1, nil, "a", gpu), salted(2, 1, "", gpu)}},
		{"own before inherited", "1=x/a 1>2=x/b", list{salted(1, nil, "a", gpu), salted(2, 1, "b", gpu)}},
		{"two claim the parent", "1=x/a 1=x/b ambiguous_cache_namespace=1",
			list{salted(1, nil, "a", gpu), salted(1, nil, "b", gpu), salted(2, 1, nil, gpu)}},
		{"own salt after an ambiguous parent", "1=x/a 1=x/b 1>2=x/a",
			list{salted(1, nil, "a", gpu), salted(1, nil, "b", gpu), salted(2, 1, "a", gpu)}},
		{"none claims it too", "1=x/a 1=x ambiguous_cache_namespace=1",
			list{salted(1, nil, "a", gpu), salted(1, nil, nil, gpu), salted(2, 1, nil, gpu)}},
		{"the same again", "1=x/a 1=x/a 1>2=x/a", list{salted(1, nil, "a", gpu), salted(1, nil, "a", gpu), salted(2, 1, nil, gpu)}},
		{"parent not known", "1>2=x", list{salted(2, 1, nil, gpu)}},
		{"unsalted first", "1=x 1=x/a 1>2=x/a", list{salted(1, nil, nil, gpu), salted(1, nil, "a", gpu), salted(2, 1, nil, gpu)}},
		{"disk does not read", "1=x/a disk:1>2=x", list{salted(1, nil, "a", gpu), salted(2, 1, nil, storage)}},
		{"disk does not write", "1=x/a disk:1=x 1>2=x/a",
			list{salted(1, nil, "a", gpu), salted(1, nil, nil, storage), salted(2, 1, nil, gpu)}},
		{"disk with its own", "disk:1=x/a 1>2=x", list{salted(1, nil, "a", storage), salted(2, 1, nil, gpu)}},
		{"host inherits", "1=x/a host_pinned:1>2=x/a", list{salted(1, nil, "a", gpu), salted(2, 1, nil, cpu)}},
		{"removed", "1=x/a -1 1>2=x", list{salted(1, nil, "a", gpu), removed(1), salted(2, 1, nil, gpu)}},
		{"removed from disk", "1=x/a disk:-1 1>2=x/a", list{salted(1, nil, "a", gpu), removed(1, storage), salted(2, 1, nil, gpu)}},
		{"ambiguity stays", "1=x/a 1=x/b -1 ambiguous_cache_namespace=1",
			list{salted(1, nil, "a", gpu), salted(1, nil, "b", gpu), removed(1), salted(2, 1, nil, gpu)}},
		{"cleared", "1=x/a clear 1>2=x", list{salted(1, nil, "a", gpu), clear, salted(2, 1, nil, gpu)}},
		{"ambiguity cleared", "1=x/a 1=x/b clear 1>2=x",
			list{salted(1, nil, "a", gpu), salted(1, nil, "b", gpu), clear, salted(2, 1, nil, gpu)}},
		{"dropped store leaves no salt", "1=x/a 1>2=x/a non_main_attention_kind=1",
			list{salted(1, nil, "a", gpu), fields{"type": "BlockStored", "block_hashes": list{1}, "token_ids": tokensX,
				"block_size": 2, "cache_salt": "b", "kv_cache_spec_kind": "mamba"}, salted(2, 1, nil, gpu)}},
	} {
		if got := play(t, batch(tt.events...)); got != tt.want {
			t.Errorf("%s: %q, want %q", tt.name, got, tt.want)
		}
	}
	first := batch(salted(1, nil, "a", gpu))
	for _, tt := range []struct {
		name, want string
		then       [][]byte
	}{
		{"next batch", "1=x/a 1>2=x/a", [][]byte{batch(salted(2, 1, nil, gpu))}},
		{"another rank", "1=x/a r1:1>2=x", [][]byte{pack(list{1.5, list{salted(2, 1, nil, gpu)}, 1})}},
		{"another rank is cleared", "1=x/a r1:clear 1>2=x/a", [][]byte{pack(list{1.5, list{clear}, 1}), batch(salted(2, 1, nil, gpu))}},
	} {
		if got := play(t, append([][]byte{first}, tt.then...)...); got != tt.want {
			t.Errorf("%s: %q, want %q", tt.name, got, tt.want)
		}
	}
}

func TestKVReset(t *testing.T) {
	n := wire.NewKVNormalizer(worker.Rank{}, 2)
	known := names()
	var b wire.KVBatch
	say := func(payload []byte) (said string) {
		if err := b.Decode(payload); err != nil {
			t.Fatal(err)
		}
		n.Each(&b, func(e *wire.KVEvent) { said += line(e, known) + " " })
		return said
	}
	say(batch(salted(1, nil, "a", "GPU"), stored(list{0}, nil, tokensX), list{"BlockTeleported"},
		with(fields{"group_idx": 3, "kv_cache_spec_kind": "full_attention"})))
	n.Reset()
	got := say(batch(salted(2, 1, nil, "GPU"), stored(list{5}, 0, tokensX), ofGroup(3, nil)))
	if want := "1>2=x 5=x "; got != want {
		t.Errorf("after Reset: %q, want %q", got, want)
	}
	if got, want := fmt.Sprint(n.Counts[wire.KVUnknownEvent], n.Counts[wire.KVUnknownGroup]), "1 1"; got != want {
		t.Errorf("counts %s, want %s", got, want)
	}
}
