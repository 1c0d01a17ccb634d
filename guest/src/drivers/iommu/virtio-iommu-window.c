// SPDX-License-Identifier: GPL-2.0-only
/*
 * Bounce windows of virtio-iommu
 *
 * A device with VIRTIO_IOMMU_F_BOUNCE_WINDOW backs chunks of memory on request, maps them for the
 * endpoints of a domain, and exposes them in a shared memory region. This file makes that memory a
 * provider for bounce pools. It checks all answers of the device: a chunk must be in the region, at
 * a place without another chunk.
 */

#define pr_fmt(fmt) "virtio_iommu: " fmt

#include <linux/bitmap.h>
#include <linux/cleanup.h>
#include <linux/delay.h>
#include <linux/io.h>
#include <linux/iommu.h>
#include <linux/log2.h>
#include <linux/memremap.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/sizes.h>
#include <linux/slab.h>
#include <linux/workqueue.h>

#ifdef CONFIG_X86
#include <asm/memtype.h>
#include <asm/pgtable.h>
#endif

#include "virtio-iommu-window.h"

/* Interval in jiffies between warnings that the removal waits for users of lent memory */
#define VIOMMU_WINDOW_SAY	(10 * HZ)

/* Requests must fit in the spare request of virtio-iommu.c, which is used if memory is short. */
static_assert(sizeof(struct virtio_iommu_req_window_add) <= sizeof(struct virtio_iommu_req_map));
static_assert(sizeof(struct virtio_iommu_req_window_del) <= sizeof(struct virtio_iommu_req_map));
static_assert(sizeof(struct virtio_iommu_req_window_v2) ==
	      offsetof(struct virtio_iommu_req_window_add, shm_offset));
static_assert(sizeof(struct virtio_iommu_req_window_v2) ==
	      offsetof(struct virtio_iommu_req_window_del, tail));

/*
 * Windows are only useful if their memory is cached. On x86, PAT and MTRRs decide on caching in
 * addition to the page tables, and may silently change the requested memory type.
 */
#ifdef CONFIG_X86

static bool can_be_cached(void)
{
	return pat_enabled();
}

/*
 * Returns true if the page tables say write-back, which the kernel sets only if PAT and MTRRs
 * agree.
 */
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
		/* Entry 0 of the PAT is write-back. Each of these bits selects another entry. */
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
	       virtio_has_feature(vdev, VIRTIO_IOMMU_F_BOUNCE_WINDOW_V2) ||
	       virtio_has_feature(vdev, VIRTIO_IOMMU_F_BOUNCE_WINDOW_V2_HIGH);
}

/**
 * viommu_window_validate - choose the feature for windows
 * @vdev: a device whose features are being negotiated
 *
 * Clears the features of version 2 if the device offers version 3. Clears all features for windows
 * if windows cannot be used. Windows need permission to bounce, a shared memory region, and cached
 * memory.
 *
 * Return: 0
 */
int viommu_window_validate(struct virtio_device *vdev)
{
	struct virtio_shm_region region;

	if (!has_windows(vdev))
		return 0;
	if (!dma_bounce_allowed() || !can_be_cached() ||
	    !virtio_get_shm_region(vdev, &region, VIRTIO_IOMMU_WINDOW_SHMID) || !region.len)
		viommu_window_clear_features(vdev);
	else if (virtio_has_feature(vdev, VIRTIO_IOMMU_F_BOUNCE_WINDOW))
		viommu_window_clear_v2(vdev);
	return 0;
}
EXPORT_SYMBOL_GPL(viommu_window_validate);

static void read_limits(struct viommu_window *window)
{
	struct virtio_device *vdev = window->vdev;
	u64 budget;
	u32 read, write;

	virtio_cread_le(vdev, struct virtio_iommu_window_config, window_budget, &budget);
	virtio_cread_le(vdev, struct virtio_iommu_window_config, bounce_threshold, &read);
	virtio_cread_le(vdev, struct virtio_iommu_window_config, bounce_threshold_write, &write);
	mutex_lock(&window->lock);
	window->budget = budget;
	window->threshold = (struct dma_bounce_thresholds) { .read = read, .write = write };
	mutex_unlock(&window->lock);
}

static void config_work(struct work_struct *work)
{
	struct viommu_window *window = container_of(work, struct viommu_window, config_work);

	read_limits(window);
	dma_bounce_limits_changed(window->ops);
}

/**
 * viommu_window_config_changed - handle a change of the device's configuration
 * @window: the windows, or NULL
 *
 * May be called in interrupt context.
 *
 * Return: true if @window is not NULL. Then a work item reads the new configuration.
 */
bool viommu_window_config_changed(struct viommu_window *window)
{
	if (!window)
		return false;
	queue_work(system_freezable_wq, &window->config_work);
	return true;
}
EXPORT_SYMBOL_GPL(viommu_window_config_changed);

/* Reads the constant part of the configuration. Returns false if it is invalid. */
static bool read_geometry(struct viommu_window *window)
{
	struct virtio_device *vdev = window->vdev;
	bool high = virtio_has_feature(vdev, VIRTIO_IOMMU_F_BOUNCE_WINDOW_V2_HIGH);
	u64 last;

	window->v2 = !virtio_has_feature(vdev, VIRTIO_IOMMU_F_BOUNCE_WINDOW);
	virtio_cread_le(vdev, struct virtio_iommu_window_config, window_iova_start,
			&window->iova_start);
	virtio_cread_le(vdev, struct virtio_iommu_window_config, window_iova_end, &last);
	virtio_cread_le(vdev, struct virtio_iommu_window_config, window_chunk_size,
			&window->chunk_size);
	if (!is_power_of_2(window->chunk_size) || window->chunk_size < DMA_BOUNCE_MIN_CHUNK ||
	    window->chunk_size > SZ_1G || last < window->iova_start ||
	    (window->v2 && !viommu_window_iova_fits(high, window->iova_start, last)) ||
	    last >= S64_MAX ||	/* prevents overflows of byte counts */
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
	window->used = devm_bitmap_zalloc(dev, window->region_len / window->chunk_size,
					  GFP_KERNEL);
	if (!window->used)
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
 * @send: sends a request
 * @viommu: argument of @send
 * @ops: provider that uses the windows
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

/* Returns true if something holds pages of the region between two offsets. */
static bool is_held(struct viommu_window *window, u64 start, u64 end)
{
	unsigned long pfn = PHYS_PFN(window->region_addr + start);
	unsigned long last = PHYS_PFN(window->region_addr + end - 1);
	struct folio *folio;

	if (!smp_load_acquire(&window->pages))	/* pairs with make_pages() */
		return false;
	for (; pfn <= last; pfn += folio_nr_pages(folio)) {
		folio = page_folio(pfn_to_page(pfn));
		if (folio_ref_count(folio) != 1)
			return true;
	}
	return false;
}

/**
 * viommu_window_remove - stop using the windows before their device is removed
 * @window: the windows, or NULL. The device no longer notifies of configuration changes.
 *
 * Waits until nothing holds pages of the windows, because the pages are about to end. Nothing can
 * get new references: all loans have been stopped.
 */
void viommu_window_remove(struct viommu_window *window)
{
	unsigned long say = jiffies + VIOMMU_WINDOW_SAY;

	if (!window)
		return;
	disable_work_sync(&window->config_work);
	while (is_held(window, 0, window->region_len)) {
		msleep(20);
		if (time_after(jiffies, say)) {
			dev_warn(&window->vdev->dev, "waiting for users of lent memory\n");
			say = jiffies + VIOMMU_WINDOW_SAY;
		}
	}
}
EXPORT_SYMBOL_GPL(viommu_window_remove);

/* Returns the windows of a domain's device. Stores the device's number of the domain in @id. */
static struct viommu_window *window_of(struct iommu_domain *domain, u32 *id)
{
	const struct dma_bounce_ops *ops = domain->ops->bounce_ops;

	return container_of(ops, struct viommu_window_provider, ops)->find(domain, id);
}

/**
 * viommu_window_limits - get the limits of a domain
 * @domain: the domain
 * @limits: set to the limits
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
	backed = window->nused * window->chunk_size;
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

/* Sends a request. Its driver's part is in the layout of version 3. */
static int send_request(struct viommu_window *window, void *buf, size_t len)
{
	/* Both requests begin alike. In the request that gives a chunk back, the flags are 0. */
	struct virtio_iommu_req_window_add *req = buf;
	struct virtio_iommu_req_window_v2 v2 = {
		.head	= req->head,
		.domain	= req->domain,
		.flags	= req->flags,
		.iova	= req->iova,
	};

	if (window->v2)
		memcpy(buf, &v2, sizeof(v2));
	return window->send(window->viommu, buf, len);
}

static int send_del(struct viommu_window *window, u32 domain, dma_addr_t iova)
{
	struct virtio_iommu_req_window_del req = {
		.head.type	= VIRTIO_IOMMU_T_WINDOW_DEL,
		.domain		= cpu_to_le32(domain),
		.iova		= cpu_to_le64(iova),
		.tail.status	= VIRTIO_IOMMU_S_IOERR,
	};

	return send_request(window, &req, sizeof(req));
}

/* Marks the chunk at @offset as in use. Returns false if @offset is invalid or already in use. */
static bool claim_chunk(struct viommu_window *window, u64 offset)
{
	if (!IS_ALIGNED(offset, window->chunk_size) || offset >= window->region_len ||
	    test_and_set_bit(offset / window->chunk_size, window->used))
		return false;
	window->nused++;
	return true;
}

/**
 * viommu_window_add - ask the device to back and map a chunk
 * @domain: a domain with windows. The device knows only domains that have endpoints.
 * @iova: address of the chunk, a multiple of the chunk size in the aperture
 * @size: the chunk size, which is not changed
 * @prot: IOMMU_READ, IOMMU_WRITE or both
 *
 * Return: the CPU's address of the chunk, or an error pointer. The error is -ENOMEM if the budget
 * is used up. After other errors, the device may still have a chunk at @iova. Then it refuses the
 * next chunk there.
 */
void *viommu_window_add(struct iommu_domain *domain, dma_addr_t iova, size_t *size, int prot)
{
	struct virtio_iommu_req_window_add req = {
		.head.type	= VIRTIO_IOMMU_T_WINDOW_ADD,
		.flags		= cpu_to_le32((prot & IOMMU_READ ? VIRTIO_IOMMU_MAP_F_READ : 0) |
					      (prot & IOMMU_WRITE ? VIRTIO_IOMMU_MAP_F_WRITE : 0)),
		.iova		= cpu_to_le64(iova),
		/* This value stays if the device fails to write its reply. */
		.shm_offset	= cpu_to_le64(U64_MAX),
		.tail.status	= VIRTIO_IOMMU_S_IOERR,
	};
	struct viommu_window *window;
	u64 offset;
	u32 id;
	int ret;

	window = window_of(domain, &id);
	req.domain = cpu_to_le32(id);
	/* The device may reuse a place before its answer says that the place is free. */
	guard(mutex)(&window->lock);
	ret = send_request(window, &req, sizeof(req));
	if (ret)
		return ERR_PTR(ret);
	offset = le64_to_cpu(req.shm_offset);
	if (!claim_chunk(window, offset)) {
		dev_err_ratelimited(&window->vdev->dev, "invalid or used chunk offset %#llx\n",
				    offset);
		if (send_del(window, id, iova))
			dev_err_ratelimited(&window->vdev->dev,
					    "device keeps the chunk at %pad\n", &iova);
		return ERR_PTR(-EIO);
	}
	return window->region + offset;
}
EXPORT_SYMBOL_GPL(viommu_window_add);

/**
 * viommu_window_del - give a chunk back
 * @domain: domain of the chunk. If the last endpoint has left it, the chunk no longer exists.
 * @iova: address of the chunk
 * @va: result of viommu_window_add() for the chunk
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
		/* The device still has the chunk, so its place in the region stays taken. */
		dev_err_ratelimited(&window->vdev->dev, "cannot give back the chunk at %pad: %d\n",
				    &iova, ret);
		return false;
	}
	clear_bit((va - window->region) / window->chunk_size, window->used);
	window->nused--;
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
	/* Use large folios: a user of many pages of a chunk then holds one folio. */
	folio = min_t(u64, window->chunk_size, PMD_SIZE);
	if (IS_ALIGNED(window->region_addr | window->region_len, folio))
		pages->vmemmap_shift = ilog2(folio) - PAGE_SHIFT;
	va = devm_memremap_pages(dev, pages);
	if (IS_ERR(va)) {
		devm_kfree(dev, pages);
		return PTR_ERR(va);
	}
	smp_store_release(&window->pages, pages);	/* pairs with is_held() */
	return 0;
}

/**
 * viommu_window_held - check if something holds pages of a chunk's memory
 * @domain: domain of the chunk
 * @va: result of viommu_window_add() for the chunk
 * @size: the chunk size
 *
 * An application may have lent the memory before, for a domain that has lost its chunks since. For
 * example, io_uring may still hold the pages.
 *
 * Return: true if a page has a reference.
 */
bool viommu_window_held(struct iommu_domain *domain, void *va, size_t size)
{
	struct viommu_window *window;
	u64 offset;
	u32 id;

	window = window_of(domain, &id);
	offset = va - window->region;
	return is_held(window, offset, offset + size);
}
EXPORT_SYMBOL_GPL(viommu_window_held);

/**
 * viommu_window_lend - make pages for the windows' memory
 * @domain: a domain with windows
 * @region: set to the memory region
 *
 * Return: 0, or an error, for example if the kernel cannot make pages for the memory.
 */
int viommu_window_lend(struct iommu_domain *domain, struct dma_bounce_region *region)
{
	struct viommu_window *window;
	int ret;
	u32 id;

	window = window_of(domain, &id);
	if (!window)
		return -ENODEV;
	/* The caller serialises these calls. */
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
