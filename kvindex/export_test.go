package kvindex

// Neighbours returns which part of the blocks that do not begin a stretch are in the cell after
// that of the block before them.
func (x *Index) Neighbours() float64 {
	near, all := 0, 0
	for i := range x.device.shards {
		t := x.device.shards[i].table.Load()
		if t == nil {
			continue
		}
		for at := range t.cells {
			if t.cells[at].holders.Load() == 0 {
				continue
			}
			before := t.find(t.origins[at].parent)
			if before < 0 {
				continue // in another shard
			}
			all++
			if before == at-1 {
				near++
			}
		}
	}
	return float64(near) / float64(max(all, 1))
}
