// The cluster's DNS: CoreDNS with the few plugins that its Corefile names. All of them together
// need the SDKs of several clouds, whose compilation takes longer than the rest of CoreDNS.
package main

import (
	"github.com/coredns/coredns/coremain"
	_ "github.com/coredns/coredns/plugin/bind"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/kubernetes"
)

func main() { coremain.Run() }
