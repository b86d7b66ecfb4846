package wire

import "unsafe"

// KVHeld is how many bytes a batch and a normalizer keep in slices.
func KVHeld(b *KVBatch, n *KVNormalizer) int {
	return cap(b.events)*int(unsafe.Sizeof(kvRaw{})) + 8*cap(b.hashes) + 4*cap(b.tokens) + cap(b.media)*int(unsafe.Sizeof(kvMedia{})) +
		8*cap(n.local) + 24*cap(n.media) + 8*cap(n.hashes) + 4*cap(n.twice.slots)
}
