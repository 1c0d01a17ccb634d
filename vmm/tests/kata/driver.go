// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

// Calls that Kata Containers makes to Cloud Hypervisor, with its own client. Each run does one step of a sandbox's life:
//
//	driver SOCKET DIRECTORY STEP
//
// DIRECTORY contains kernel, initrd and disk.img. docs/kata.md explains how to build this program.
package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"
	"unsafe"

	chclient "driver/client"
)

const (
	mib       = int64(1 << 20)
	guestCID  = int64(3)
	mac       = "02:00:ca:fe:00:01"
	maxVCPUs  = int32(2)
	bootRAM   = 256 * mib
	moreRAM   = 512 * mib
	apiTime   = 10 * time.Second
	queueSize = int32(1024)
)

func client(socket string) *chclient.DefaultApiService {
	configuration := chclient.NewConfiguration()
	dial := func(context.Context, string, string) (net.Conn, error) {
		return net.DialUnix("unix", nil, &net.UnixAddr{Name: socket, Net: "unix"})
	}
	configuration.HTTPClient = &http.Client{Transport: &http.Transport{DialContext: dial}}
	return chclient.NewAPIClient(configuration).DefaultApi
}

// Default configuration of a sandbox without a shared file system.
func config(directory string) chclient.VmConfig {
	in := func(name string) string { return filepath.Join(directory, name) }
	vm := *chclient.NewVmConfig(*chclient.NewPayloadConfig())
	vm.Payload.SetKernel(in("kernel"))
	vm.Payload.SetInitramfs(in("initrd"))
	vm.Payload.SetCmdline("panic=1 no_timer_check noreplace-smp quiet agent.log_vport=1025")
	vm.Platform = chclient.NewPlatformConfig()
	vm.Platform.SetNumPciSegments(2)
	vm.Memory = chclient.NewMemoryConfig(bootRAM)
	vm.Memory.SetShared(true)
	vm.Memory.SetHugepages(false)
	vm.Memory.SetHotplugSize(1024 * mib)
	vm.Cpus = chclient.NewCpusConfig(1, maxVCPUs)
	topology := chclient.NewCpuTopology()
	topology.SetThreadsPerCore(1)
	topology.SetCoresPerDie(maxVCPUs)
	topology.SetDiesPerPackage(1)
	topology.SetPackages(1)
	vm.Cpus.Topology = topology
	vm.Rng = chclient.NewRngConfig("/dev/urandom")
	vm.Rng.SetIommu(false)
	vm.Serial = chclient.NewConsoleConfig("Off")
	vm.Console = chclient.NewConsoleConfig("Off")
	vm.Console.SetIommu(false)
	vm.Vsock = chclient.NewVsockConfig(guestCID, in("clh.sock"))
	vm.Vsock.SetIommu(false)
	return vm
}

// Opens a file of a new tap interface, as the runtime opens it.
func tap() (*os.File, error) {
	const tunSetIff, flags = 0x400454ca, 0x0002 | 0x1000 | 0x4000 | 0x0100
	file, err := os.OpenFile("/dev/net/tun", os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	var request [40]byte
	copy(request[:16], "kata%d")
	*(*uint16)(unsafe.Pointer(&request[16])) = flags
	if _, _, errno := syscall.Syscall(syscall.SYS_IOCTL, file.Fd(), tunSetIff, uintptr(unsafe.Pointer(&request))); errno != 0 {
		return nil, errno
	}
	return file, nil
}

// The runtime does not use the generated client here, because a descriptor must be sent with the request.
func addNet(socket string) (string, error) {
	device := chclient.NewNetConfig()
	device.SetMac(mac)
	device.SetIommu(false)
	file, err := tap()
	if err != nil {
		return "", err
	}
	defer file.Close()
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		return "", err
	}
	defer conn.Close()
	body, err := json.Marshal(device)
	if err != nil {
		return "", err
	}
	request, err := http.NewRequest(http.MethodPut, "http://localhost/api/v1/vm.add-net", bytes.NewBuffer(body))
	if err != nil {
		return "", err
	}
	request.Header.Set("Accept", "application/json")
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Content-Length", strconv.Itoa(len(body)))
	payload, err := httputil.DumpRequest(request, true)
	if err != nil {
		return "", err
	}
	rights := syscall.UnixRights(int(file.Fd()))
	if _, _, err = conn.WriteMsgUnix(payload, rights, nil); err != nil {
		return "", err
	}
	response, err := http.ReadResponse(bufio.NewReader(conn), request)
	if err != nil {
		return "", err
	}
	answer, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != 200 && response.StatusCode != 204 {
		err = fmt.Errorf("status %d", response.StatusCode)
	}
	return string(answer), err
}

func run(socket, directory, step string) (any, error) {
	api, id := client(socket), ""
	ctx, cancel := context.WithTimeout(context.Background(), apiTime)
	defer cancel()
	if rest, found := bytes.CutPrefix([]byte(step), []byte("remove-device=")); found {
		step, id = "remove-device", string(rest)
	}
	if rest, found := bytes.CutPrefix([]byte(step), []byte("add-device=")); found {
		step, id = "add-device", string(rest)
	}
	switch step {
	case "ping":
		answer, _, err := api.VmmPingGet(ctx).Execute()
		return answer, err
	case "create":
		_, err := api.CreateVM(ctx).VmConfig(config(directory)).Execute()
		return nil, err
	case "info":
		answer, _, err := api.VmInfoGet(ctx).Execute()
		return answer, err
	case "add-net":
		return addNet(socket)
	case "boot":
		_, err := api.BootVM(ctx).Execute()
		return nil, err
	case "add-disk":
		disk := chclient.NewDiskConfig()
		disk.SetPath(filepath.Join(directory, "disk.img"))
		disk.SetReadonly(false)
		disk.SetImageType("Raw")
		disk.SetVhostUser(false)
		disk.SetNumQueues(1)
		disk.SetQueueSize(queueSize)
		disk.SetIommu(false)
		answer, _, err := api.VmAddDiskPut(ctx).DiskConfig(*disk).Execute()
		return answer, err
	case "add-device":
		device := chclient.NewDeviceConfig(id)
		device.SetIommu(false)
		answer, _, err := api.VmAddDevicePut(ctx).DeviceConfig(*device).Execute()
		return answer, err
	case "resize-memory":
		resize := chclient.NewVmResize()
		resize.SetDesiredRam(moreRAM)
		_, err := api.VmResizePut(ctx).VmResize(*resize).Execute()
		return nil, err
	case "resize-vcpus":
		resize := chclient.NewVmResize()
		resize.SetDesiredVcpus(maxVCPUs)
		_, err := api.VmResizePut(ctx).VmResize(*resize).Execute()
		return nil, err
	case "remove-device":
		remove := chclient.NewVmRemoveDevice()
		remove.SetId(id)
		_, err := api.VmRemoveDevicePut(ctx).VmRemoveDevice(*remove).Execute()
		return nil, err
	case "pause":
		_, err := api.PauseVM(ctx).Execute()
		return nil, err
	case "resume":
		_, err := api.ResumeVM(ctx).Execute()
		return nil, err
	case "shutdown-vmm":
		_, err := api.ShutdownVMM(ctx).Execute()
		return nil, err
	}
	return nil, fmt.Errorf("no step '%s'", step)
}

func main() {
	if len(os.Args) != 4 {
		fmt.Fprintln(os.Stderr, "usage: driver SOCKET DIRECTORY STEP")
		os.Exit(2)
	}
	answer, err := run(os.Args[1], os.Args[2], os.Args[3])
	if err != nil {
		// Answer of the server, as the runtime logs it.
		reason := ""
		if refused, ok := err.(chclient.GenericOpenAPIError); ok {
			reason = string(refused.Body())
		}
		fmt.Fprintf(os.Stderr, "%v %s\n", err, reason)
		os.Exit(1)
	}
	if text, ok := answer.(string); ok {
		fmt.Println(text)
	} else if answer != nil {
		if err := json.NewEncoder(os.Stdout).Encode(answer); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
}
