// Package spillway holds no code. The command is in cmd/spillway; ARCHITECTURE.md tells what
// each package is for. The tests here compare the imports of all packages with that list.
package spillway
