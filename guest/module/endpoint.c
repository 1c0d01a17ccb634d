// SPDX-License-Identifier: GPL-2.0-only
/*
 * Endpoints: PCI devices behind the virtio-iommu
 *
 * A device is attached, and given its DMA operations, when a driver is about to be bound to it, and
 * detached when the driver is gone. Whether it is behind the virtio-iommu, that says itself: its
 * numbers for endpoints are taken to be PCI requester IDs.
 */

#include <linux/dma-mapping.h>
#include <linux/idr.h>
#include <linux/list.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/seq_file.h>
#include <linux/slab.h>
#include <linux/string.h>

#include "virtio-iommu-bounce.h"

static char *drivers = "nvme";
module_param(drivers, charp, 0444);
MODULE_PARM_DESC(drivers, "Drivers whose DMA bounces, with commas between; that of others is mapped");

static uint threshold;
module_param(threshold, uint, 0444);
MODULE_PARM_DESC(threshold, "Bytes up to which DMA bounces; 0: what the host advises, or else 128 KiB");

static bool bounce = true;
module_param(bounce, bool, 0444);
MODULE_PARM_DESC(bounce, "Whether any DMA bounces");

/* The virtio-iommu, and what is attached */
static DEFINE_MUTEX(lock);
static struct vib_device *device_or_null;
static LIST_HEAD(endpoints);
static DEFINE_IDA(domains);
static struct dentry *debugfs;

static int stats_show(struct seq_file *file, void *unused)
{
	struct vib_endpoint *endpoint = file->private;

	seq_printf(file, "bounced %lld\n", atomic64_read(&endpoint->bounced));
	seq_printf(file, "mapped %lld\n", atomic64_read(&endpoint->mapped));
	seq_printf(file, "no_slot %lld\n", atomic64_read(&endpoint->no_slot));
	seq_printf(file, "chunks %d\n", atomic_read(&endpoint->nchunks));
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(stats);

/* The bytes up to which the DMA of a driver bounces */
static size_t threshold_of(struct vib_device *device, const char *driver)
{
	const char *word = drivers;
	size_t size = threshold ?: device->advised ?: VIB_MAX_SLOT;
	size_t len;

	for (; bounce && *word; word += len + (word[len] == ',')) {
		len = strcspn(word, ",");
		if (len == strlen(driver) && !strncmp(word, driver, len))
			return min_t(size_t, size, VIB_MAX_SLOT);
	}
	return 0;
}

static u32 number_of(struct pci_dev *pci)
{
	return pci_domain_nr(pci->bus) << 16 | pci_dev_id(pci);
}

static int attach(struct vib_endpoint *endpoint)
{
	struct virtio_iommu_req_attach attach = {
		.head.type	= VIRTIO_IOMMU_T_ATTACH,
		.domain		= cpu_to_le32(endpoint->domain),
		.endpoint	= cpu_to_le32(number_of(endpoint->pci)),
	};

	return vib_send(endpoint->device, &attach, tail);
}

/* All that is mapped in the domain ends with it, as no other endpoint is in it. */
static int detach(struct vib_endpoint *endpoint)
{
	struct virtio_iommu_req_detach detach = {
		.head.type	= VIRTIO_IOMMU_T_DETACH,
		.domain		= cpu_to_le32(endpoint->domain),
		.endpoint	= cpu_to_le32(number_of(endpoint->pci)),
	};

	return vib_send(endpoint->device, &detach, tail);
}

static int reserve(struct vib_endpoint *endpoint, u64 start, u64 end)
{
	if (start > end)
		return -EINVAL;
	return reserve_iova(&endpoint->iovad, start >> PAGE_SHIFT, end >> PAGE_SHIFT) ? 0 : -ENOMEM;
}

/* Keeps clear of what the virtio-iommu says that the endpoint cannot use. */
static int reserve_probed(struct vib_endpoint *endpoint)
{
	struct vib_device *device = endpoint->device;
	size_t readable = sizeof(struct virtio_iommu_req_probe), at = 0;
	size_t size = readable + device->probe_size + sizeof(struct virtio_iommu_req_tail);
	struct virtio_iommu_req_probe *probe;
	int ret;

	if (!device->probe_size)
		return 0;
	probe = kzalloc(size, GFP_KERNEL);
	if (!probe)
		return -ENOMEM;
	probe->head.type = VIRTIO_IOMMU_T_PROBE;
	probe->endpoint = cpu_to_le32(number_of(endpoint->pci));
	ret = vib_request(device, probe, readable, size);
	while (!ret && at + sizeof(struct virtio_iommu_probe_property) <= device->probe_size) {
		struct virtio_iommu_probe_resv_mem *mem = (void *)probe->properties + at;
		size_t len = sizeof(mem->head) + le16_to_cpu(mem->head.length);
		unsigned int type = le16_to_cpu(mem->head.type) & VIRTIO_IOMMU_PROBE_T_MASK;

		if (type == VIRTIO_IOMMU_PROBE_T_NONE)
			break;
		if (len > device->probe_size - at)
			ret = -EINVAL;
		else if (type == VIRTIO_IOMMU_PROBE_T_RESV_MEM && len >= sizeof(*mem))
			ret = reserve(endpoint, le64_to_cpu(mem->start), le64_to_cpu(mem->end));
		at += len;
	}
	kfree(probe);
	return ret;
}

/*
 * Keeps clear of what nothing can be mapped at: windows, what is reserved, and addresses of other
 * devices, to which DMA may be routed before any IOMMU sees it.
 */
static int reserve_all(struct vib_endpoint *endpoint)
{
	struct pci_host_bridge *bridge = pci_find_host_bridge(endpoint->pci->bus);
	struct vib_device *device = endpoint->device;
	struct resource_entry *window;
	int ret;

	ret = reserve(endpoint, device->iova_start, device->iova_start + device->iova_len - 1);
	if (!ret)
		ret = reserve_probed(endpoint);
	resource_list_for_each_entry(window, &bridge->windows) {
		if (!ret && resource_type(window->res) == IORESOURCE_MEM)
			ret = reserve(endpoint, window->res->start - window->offset,
				      window->res->end - window->offset);
	}
	return ret;
}

static int new_domain(struct vib_device *device)
{
	int first = min_t(u32, device->first_domain, INT_MAX);
	int last = min_t(u32, device->last_domain, INT_MAX);

	return ida_alloc_range(&domains, first, last, GFP_KERNEL);
}

static void add_debugfs(struct vib_endpoint *endpoint)
{
	endpoint->debugfs = debugfs_create_dir(pci_name(endpoint->pci), debugfs);
	debugfs_create_file("stats", 0400, endpoint->debugfs, endpoint, &stats_fops);
}

/* Puts a device into a domain of its own, if it is behind the virtio-iommu. */
static int add(struct vib_device *device, struct pci_dev *pci)
{
	struct vib_endpoint *endpoint;
	int ret;

	endpoint = kzalloc(sizeof(*endpoint), GFP_KERNEL);
	if (!endpoint)
		return -ENOMEM;
	endpoint->device = device;
	endpoint->pci = pci;
	endpoint->ops = vib_dma_ops;
	endpoint->threshold = threshold_of(device, pci->dev.driver->name);
	ret = new_domain(device);
	if (ret < 0)
		goto free;
	endpoint->domain = ret;
	ret = attach(endpoint);
	if (ret)
		goto free_domain;
	init_iova_domain(&endpoint->iovad, PAGE_SIZE, 1);
	ret = vib_slots_init(endpoint);
	if (ret)
		goto put_iovad;
	ret = iova_domain_init_rcaches(&endpoint->iovad);
	if (!ret)
		ret = reserve_all(endpoint);
	if (ret)
		goto free_slots;
	/* Driver and device go before the virtio-iommu does. The link ends with the driver. */
	ret = -EINVAL;
	if (!device_link_add(&pci->dev, &device->vdev->dev, DL_FLAG_AUTOREMOVE_CONSUMER))
		goto free_slots;
	add_debugfs(endpoint);
	/* What is attached must be detached before the module goes. */
	__module_get(THIS_MODULE);
	list_add(&endpoint->next, &endpoints);
	set_dma_ops(&pci->dev, &endpoint->ops);
	dev_info(&pci->dev, "in domain %u; DMA of up to %zu bytes bounces\n", endpoint->domain,
		 endpoint->threshold);
	return 0;

free_slots:
	vib_slots_free(endpoint);
put_iovad:
	put_iova_domain(&endpoint->iovad);
	detach(endpoint);
free_domain:
	ida_free(&domains, endpoint->domain);
free:
	kfree(endpoint);
	return ret;
}

/*
 * The driver is gone, and with it all DMA. If the virtio-iommu does not let the endpoint go, the
 * number of its domain and the places of its chunks are never used again.
 */
static void remove(struct vib_endpoint *endpoint)
{
	int ret;

	set_dma_ops(&endpoint->pci->dev, NULL);
	list_del(&endpoint->next);
	debugfs_remove_recursive(endpoint->debugfs);
	ret = detach(endpoint);
	if (ret) {
		dev_err(&endpoint->pci->dev, "stays attached: %d\n", ret);
	} else {
		vib_slots_free(endpoint);
		put_iova_domain(&endpoint->iovad);
		ida_free(&domains, endpoint->domain);
		kfree(endpoint);
	}
	module_put(THIS_MODULE);
}

static void bound(struct pci_dev *pci)
{
	int ret;

	/* Another IOMMU's, or Xen's */
	if (!device_or_null || pci->dev.dma_ops || device_iommu_mapped(&pci->dev))
		return;
	ret = add(device_or_null, pci);
	/* Without a domain its DMA reaches nothing; its driver will find out. */
	if (ret && ret != -ENOENT)
		dev_err(&pci->dev, "cannot be attached to the virtio-iommu: %d\n", ret);
}

static void unbound(struct pci_dev *pci)
{
	struct vib_endpoint *endpoint;

	list_for_each_entry(endpoint, &endpoints, next) {
		if (endpoint->pci == pci) {
			remove(endpoint);
			return;
		}
	}
}

static int notified(struct notifier_block *block, unsigned long action, void *data)
{
	struct pci_dev *pci = to_pci_dev(data);

	mutex_lock(&lock);
	if (action == BUS_NOTIFY_BIND_DRIVER)
		bound(pci);
	else if (action == BUS_NOTIFY_UNBOUND_DRIVER || action == BUS_NOTIFY_DRIVER_NOT_BOUND)
		unbound(pci);
	mutex_unlock(&lock);
	return NOTIFY_OK;
}

struct notifier_block vib_pci_notifier = { .notifier_call = notified };

/**
 * vib_endpoints_begin - there is a virtio-iommu
 * @device: it; if there is another one already, its endpoints are not served
 */
void vib_endpoints_begin(struct vib_device *device)
{
	mutex_lock(&lock);
	if (!device_or_null) {
		debugfs = debugfs_create_dir(KBUILD_MODNAME, NULL);
		device_or_null = device;
	}
	mutex_unlock(&lock);
}

/* The virtio-iommu goes away; it has no endpoints any more. */
void vib_endpoints_end(void)
{
	mutex_lock(&lock);
	WARN_ON(!list_empty(&endpoints));
	device_or_null = NULL;
	debugfs_remove_recursive(debugfs);
	mutex_unlock(&lock);
}
