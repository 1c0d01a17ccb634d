// SPDX-License-Identifier: GPL-2.0-only
/*
 * Bounce windows of virtio-iommu
 *
 * A device with VIRTIO_IOMMU_F_BOUNCE_WINDOW backs chunks of memory on request, maps them for a
 * domain's endpoints, and shows them in a shared memory region. Here that memory becomes a provider
 * for the pools of small bounced DMA. Nothing that the device answers is taken on trust: a chunk
 * must lie in the region, where no other chunk is.
 */

#define pr_fmt(fmt) "virtio_iommu: " fmt

#include <linux/bitmap.h>
#include <linux/cleanup.h>
#include <linux/io.h>
#include <linux/iommu.h>
#include <linux/log2.h>
#include <linux/memremap.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/sizes.h>
#include <linux/slab.h>
#include <linux/virtio_config.h>
#include <linux/workqueue.h>

#ifdef CONFIG_X86
#include <asm/memtype.h>
#include <asm/pgtable.h>
#endif

#include "virtio-iommu-window.h"

/* Fit in the spare request of virtio-iommu.c, so that no chunk is kept for want of memory */
static_assert(sizeof(struct virtio_iommu_req_window_add) <= sizeof(struct virtio_iommu_req_map));
static_assert(sizeof(struct virtio_iommu_req_window_del) <= sizeof(struct virtio_iommu_req_map));

/*
 * Windows are only worth having if their memory is cached. On x86 that is not for the page tables
 * alone to say, and what is asked for may silently become something else.
 */
#ifdef CONFIG_X86

static bool can_be_cached(void)
{
	return pat_enabled();
}

/* Whether the page tables say write-back, which is what they get only if PAT and MTRRs agree */
static bool mapped_write_back(void *region, u64 len, u64 step)
{
	unsigned int level;
	pteval_t uncached;
	pte_t *pte;
	u64 offset;

	for (offset = 0; offset < len; offset += step) {
		pte = lookup_address((unsigned long)region + offset, &level);
		if (!pte)
			return false;
		/* Entry 0 of the PAT is write-back; so any of the bits means something else. */
		uncached = _PAGE_PWT | _PAGE_PCD;
		uncached |= level == PG_LEVEL_4K ? _PAGE_PAT : _PAGE_PAT_LARGE;
		if (pte_flags(*pte) & uncached)
			return false;
	}
	return true;
}

#else /* !CONFIG_X86 */

static bool can_be_cached(void)
{
	return true;
}

static bool mapped_write_back(void *region, u64 len, u64 step)
{
	return true;
}

#endif /* CONFIG_X86 */

static bool has_windows(struct virtio_device *vdev)
{
	return virtio_has_feature(vdev, VIRTIO_IOMMU_F_BOUNCE_WINDOW) ||
	       virtio_has_feature(vdev, VIRTIO_IOMMU_F_BOUNCE_WINDOW_HIGH);
}

/**
 * viommu_window_validate - decide whether to accept the feature
 * @vdev: a device whose features are being negotiated
 *
 * Return: 0; the features are cleared if windows are not wanted.
 */
int viommu_window_validate(struct virtio_device *vdev)
{
	struct virtio_shm_region region;

	if (!has_windows(vdev))
		return 0;
	if (!dma_bounce_allowed() || !can_be_cached() ||
	    !virtio_get_shm_region(vdev, &region, VIRTIO_IOMMU_WINDOW_SHMID) || !region.len) {
		__virtio_clear_bit(vdev, VIRTIO_IOMMU_F_BOUNCE_WINDOW);
		__virtio_clear_bit(vdev, VIRTIO_IOMMU_F_BOUNCE_WINDOW_HIGH);
	}
	return 0;
}
EXPORT_SYMBOL_GPL(viommu_window_validate);

static void read_limits(struct viommu_window *window)
{
	struct virtio_device *vdev = window->vdev;
	u64 budget;
	u32 threshold;

	virtio_cread_le(vdev, struct virtio_iommu_window_config, window_budget, &budget);
	virtio_cread_le(vdev, struct virtio_iommu_window_config, bounce_threshold, &threshold);
	mutex_lock(&window->lock);
	window->budget = budget;
	window->threshold = threshold;
	mutex_unlock(&window->lock);
}

static void config_work(struct work_struct *work)
{
	struct viommu_window *window = container_of(work, struct viommu_window, config_work);

	read_limits(window);
	dma_bounce_limits_changed(window->ops);
}

/**
 * viommu_window_config_changed - the device's configuration has changed
 * @window: the windows, or NULL; may be called in interrupt context
 *
 * Return: whether there are windows, which look after it.
 */
bool viommu_window_config_changed(struct viommu_window *window)
{
	if (!window)
		return false;
	queue_work(system_freezable_wq, &window->config_work);
	return true;
}
EXPORT_SYMBOL_GPL(viommu_window_config_changed);

/* Reads the constant part of the configuration; false if it makes no sense. */
static bool read_geometry(struct viommu_window *window)
{
	struct virtio_device *vdev = window->vdev;
	bool high = virtio_has_feature(vdev, VIRTIO_IOMMU_F_BOUNCE_WINDOW_HIGH);
	u64 last;

	virtio_cread_le(vdev, struct virtio_iommu_window_config, window_iova_start,
			&window->iova_start);
	virtio_cread_le(vdev, struct virtio_iommu_window_config, window_iova_end, &last);
	virtio_cread_le(vdev, struct virtio_iommu_window_config, window_chunk_size,
			&window->chunk_size);
	if (!is_power_of_2(window->chunk_size) || window->chunk_size < DMA_BOUNCE_MIN_CHUNK ||
	    window->chunk_size > SZ_1G || last < window->iova_start ||
	    !viommu_window_iova_fits(high, window->iova_start, last) ||
	    !IS_ALIGNED(window->iova_start, window->chunk_size))
		return false;
	window->iova_len = round_down(last - window->iova_start + 1, window->chunk_size);
	return window->iova_len;
}

static int map_region(struct viommu_window *window)
{
	struct device *dev = &window->vdev->dev;
	struct virtio_shm_region region;

	if (!virtio_get_shm_region(window->vdev, &region, VIRTIO_IOMMU_WINDOW_SHMID))
		return -ENODEV;
	window->region_addr = region.addr;
	window->region_len = round_down(region.len, window->chunk_size);
	if (!window->region_len || !IS_ALIGNED(region.addr, window->chunk_size) ||
	    window->region_len / window->chunk_size > INT_MAX)
		return -EINVAL;
	window->shown = devm_bitmap_zalloc(dev, window->region_len / window->chunk_size,
					   GFP_KERNEL);
	if (!window->shown)
		return -ENOMEM;
	if (!devm_request_mem_region(dev, region.addr, window->region_len, "bounce windows"))
		return -EBUSY;
	window->region = devm_memremap(dev, region.addr, window->region_len, MEMREMAP_WB);
	if (IS_ERR(window->region))
		return PTR_ERR(window->region);
	if (!mapped_write_back(window->region, window->region_len, SZ_2M)) {
		dev_warn(dev, "bounce windows are not used: MTRRs or PAT do not let their memory be cached\n");
		return -EOPNOTSUPP;
	}
	return 0;
}

/**
 * viommu_window_probe - set up the windows of a device
 * @vdev: the device
 * @send: how to send a request
 * @viommu: passed to @send
 * @ops: the provider that will call us
 *
 * Return: the windows, or NULL if the device has none or they cannot be used.
 */
struct viommu_window *viommu_window_probe(struct virtio_device *vdev, viommu_window_send_t send,
					  struct viommu_dev *viommu,
					  const struct dma_bounce_ops *ops)
{
	struct viommu_window *window;
	int ret;

	if (!has_windows(vdev))
		return NULL;
	window = devm_kzalloc(&vdev->dev, sizeof(*window), GFP_KERNEL);
	if (!window)
		return NULL;
	window->vdev = vdev;
	window->send = send;
	window->viommu = viommu;
	window->ops = ops;
	mutex_init(&window->lock);
	INIT_WORK(&window->config_work, config_work);
	ret = read_geometry(window) ? map_region(window) : -EINVAL;
	if (ret) {
		dev_warn(&vdev->dev, "bounce windows are not used (error %d)\n", ret);
		return NULL;
	}
	read_limits(window);
	dev_info(&vdev->dev,
		 "bounce windows: IOVA %#llx-%#llx, chunks of %llu KiB, budget %llu KiB\n",
		 window->iova_start, window->iova_start + window->iova_len - 1,
		 window->chunk_size >> 10, window->budget >> 10);
	return window;
}
EXPORT_SYMBOL_GPL(viommu_window_probe);

/**
 * viommu_window_remove - the device goes away
 * @window: its windows, or NULL. No configuration change is notified any more.
 */
void viommu_window_remove(struct viommu_window *window)
{
	if (window)
		disable_work_sync(&window->config_work);
}
EXPORT_SYMBOL_GPL(viommu_window_remove);

/* The windows of a domain's device, and the number by which the device knows the domain */
static struct viommu_window *window_of(struct iommu_domain *domain, u32 *id)
{
	const struct dma_bounce_ops *ops = domain->ops->bounce_ops;

	return container_of(ops, struct viommu_window_provider, ops)->find(domain, id);
}

/**
 * viommu_window_limits - what the windows allow a domain
 * @domain: the domain
 * @limits: where to tell it
 *
 * Return: 0, or -ENODEV without windows.
 */
int viommu_window_limits(struct iommu_domain *domain, struct dma_bounce_limits *limits)
{
	struct viommu_window *window;
	u64 backed;
	u32 id;

	window = window_of(domain, &id);
	if (!window)
		return -ENODEV;
	limits->iova = window->iova_start;
	limits->len = window->iova_len;
	limits->chunk_size = window->chunk_size;
	mutex_lock(&window->lock);
	backed = window->nshown * window->chunk_size;
	limits->budget = min(window->budget, window->iova_len);
	limits->threshold = window->threshold;
	limits->source = window;
	limits->surplus = 0;
	if (backed > window->budget)
		limits->surplus = DIV_ROUND_UP_ULL(backed - window->budget, window->chunk_size);
	mutex_unlock(&window->lock);
	return 0;
}
EXPORT_SYMBOL_GPL(viommu_window_limits);

static int send_del(struct viommu_window *window, u32 domain, dma_addr_t iova)
{
	struct virtio_iommu_req_window_del req = {
		.head.type	= VIRTIO_IOMMU_T_WINDOW_DEL,
		.domain		= cpu_to_le32(domain),
		.iova		= cpu_to_le64(iova),
		.tail.status	= VIRTIO_IOMMU_S_IOERR,
	};

	return window->send(window->viommu, &req, sizeof(req));
}

/* Marks a chunk of the region as in use, if there is one at @offset that is not. */
static bool claim_shown(struct viommu_window *window, u64 offset)
{
	if (!IS_ALIGNED(offset, window->chunk_size) || offset >= window->region_len ||
	    test_and_set_bit(offset / window->chunk_size, window->shown))
		return false;
	window->nshown++;
	return true;
}

/**
 * viommu_window_add - have a chunk backed and mapped
 * @domain: a domain that has windows. The device knows none without endpoints.
 * @iova: where, a multiple of the chunk size in the aperture
 * @size: the chunk size, which stays
 * @prot: IOMMU_READ, IOMMU_WRITE or both
 *
 * Return: where the chunk is, or an error pointer; -ENOMEM if the budget is used up. After another
 * error the device may have a chunk at @iova that we do not: it refuses the next one there.
 */
void *viommu_window_add(struct iommu_domain *domain, dma_addr_t iova, size_t *size, int prot)
{
	struct virtio_iommu_req_window_add req = {
		.head.type	= VIRTIO_IOMMU_T_WINDOW_ADD,
		.flags		= cpu_to_le32((prot & IOMMU_READ ? VIRTIO_IOMMU_MAP_F_READ : 0) |
					      (prot & IOMMU_WRITE ? VIRTIO_IOMMU_MAP_F_WRITE : 0)),
		.iova		= cpu_to_le64(iova),
		/* What stays if the device does not write the reply that it should */
		.shm_offset	= cpu_to_le64(U64_MAX),
		.tail.status	= VIRTIO_IOMMU_S_IOERR,
	};
	struct viommu_window *window;
	u64 offset;
	u32 id;
	int ret;

	window = window_of(domain, &id);
	req.domain = cpu_to_le32(id);
	/* The device may reuse a place before we hear that it is free. */
	guard(mutex)(&window->lock);
	ret = window->send(window->viommu, &req, sizeof(req));
	if (ret)
		return ERR_PTR(ret);
	offset = le64_to_cpu(req.shm_offset);
	if (!claim_shown(window, offset)) {
		dev_err_ratelimited(&window->vdev->dev, "device puts a chunk at %#llx\n", offset);
		if (send_del(window, id, iova))
			dev_err_ratelimited(&window->vdev->dev, "it keeps it at %pad\n", &iova);
		return ERR_PTR(-EIO);
	}
	return window->region + offset;
}
EXPORT_SYMBOL_GPL(viommu_window_add);

/**
 * viommu_window_del - give a chunk back
 * @domain: its domain. If that has lost its last endpoint, the chunk is gone already.
 * @iova: the chunk
 * @va: what viommu_window_add() returned for it
 * @size: the chunk size
 *
 * Return: false if the device still has the chunk.
 */
bool viommu_window_del(struct iommu_domain *domain, dma_addr_t iova, void *va, size_t size)
{
	struct viommu_window *window;
	u32 id;
	int ret;

	window = window_of(domain, &id);
	guard(mutex)(&window->lock);
	ret = send_del(window, id, iova);
	if (ret && ret != -ENOENT) {
		/* The device still has the chunk: its place in the region stays taken. */
		dev_err_ratelimited(&window->vdev->dev, "cannot give back the chunk at %pad: %d\n",
				    &iova, ret);
		return false;
	}
	clear_bit((va - window->region) / window->chunk_size, window->shown);
	window->nshown--;
	return true;
}
EXPORT_SYMBOL_GPL(viommu_window_del);

static int make_pages(struct viommu_window *window)
{
	struct device *dev = &window->vdev->dev;
	struct dev_pagemap *pages;
	u64 folio;
	void *va;

	pages = devm_kzalloc(dev, sizeof(*pages), GFP_KERNEL);
	if (!pages)
		return -ENOMEM;
	pages->type = MEMORY_DEVICE_GENERIC;
	pages->owner = DMA_BOUNCE_LEND_OWNER;
	pages->range.start = window->region_addr;
	pages->range.end = window->region_addr + window->region_len - 1;
	pages->nr_range = 1;
	/* Whoever has many pages of a chunk is to hold one thing, not each of them. */
	folio = min_t(u64, window->chunk_size, PMD_SIZE);
	if (IS_ALIGNED(window->region_addr | window->region_len, folio))
		pages->vmemmap_shift = ilog2(folio) - PAGE_SHIFT;
	va = devm_memremap_pages(dev, pages);
	if (IS_ERR(va)) {
		devm_kfree(dev, pages);
		return PTR_ERR(va);
	}
	window->pages = pages;
	return 0;
}

/**
 * viommu_window_lend - make pages of the windows' memory
 * @domain: a domain that has windows
 * @region: where to tell where it is
 *
 * Return: 0, or an error, as where the kernel cannot have pages of it.
 */
int viommu_window_lend(struct iommu_domain *domain, struct dma_bounce_region *region)
{
	struct viommu_window *window;
	int ret;
	u32 id;

	window = window_of(domain, &id);
	if (!window)
		return -ENODEV;
	/* The caller has one at a time. */
	if (!window->pages) {
		ret = make_pages(window);
		if (ret)
			return ret;
	}
	region->phys = window->region_addr;
	region->va = window->region;
	region->len = window->region_len;
	return 0;
}
EXPORT_SYMBOL_GPL(viommu_window_lend);

MODULE_DESCRIPTION("Bounce windows of virtio-iommu");
MODULE_LICENSE("GPL");
