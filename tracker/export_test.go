package tracker

// StoredBlocks counts the blocks in all runs of the prompts.
func (t *Tracker) StoredBlocks() int {
	t.lock()
	defer t.mu.Unlock()
	total, todo := 0, []*node{&t.prompts.root}
	for len(todo) > 0 {
		n := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		total += len(n.run)
		if n.kids.only != nil {
			todo = append(todo, n.kids.only)
		}
		for _, kid := range n.kids.many.m {
			todo = append(todo, kid)
		}
	}
	return total
}
