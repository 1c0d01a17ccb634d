// SPDX-License-Identifier: GPL-2.0-only
/*
 * Bouncing of small DMA: which mappings bounce, and what is copied when
 *
 * A mapping that bounces gets a slot of its domain's pool (see dma-bounce-pool.c) instead of a
 * mapping of its own. dma-iommu.c asks here first and goes the ordinary way if we decline.
 *
 * Who: devices whose driver has opted in with dma_bounce_opt_in(), because there are mappings that
 * live long and are never synchronised, which no attribute tells. An administrator can switch it on
 * or off for a device in sysfs, and on for all at boot with iommu.bounce=all.
 *
 * What is copied: whatever the direction, a mapping copies the buffer to the slot, for bytes that
 * the device does not write must come back as they were, and what an earlier user left in the slot
 * must not come back at all. The exception costs the driver two attributes: nothing is copied at
 * map with DMA_ATTR_BOUNCE_NO_COPY_IN, and what the slot holds is copied back only if unmap vouches
 * for every byte of it with DMA_ATTR_BOUNCE_ALL_WRITTEN.
 *
 * Which addresses are ours is decided by their range alone: nothing in a scatterlist would tell.
 */

#define pr_fmt(fmt) "iommu: bounce: " fmt

#include <linux/blk-mq.h>
#include <linux/device.h>
#include <linux/dma-map-ops.h>
#include <linux/highmem.h>
#include <linux/iommu-dma.h>
#include <linux/iova.h>
#include <linux/memremap.h>
#include <linux/pci.h>
#include <linux/scatterlist.h>
#include <linux/slab.h>

#include <trace/events/dma_bounce.h>

#include "dma-bounce.h"
#include "dma-bounce-pool.h"

DEFINE_STATIC_KEY_FALSE(dma_bounce_key);

/*
 * Mappings that are used without being synchronised (DMA_ATTR_SKIP_CPU_SYNC means that it is done
 * later, which reaches memory that is not ours), and what is not for the device alone
 */
#define DMA_BOUNCE_NEVER	(DMA_ATTR_SKIP_CPU_SYNC | DMA_ATTR_PRIVILEGED | \
				 DMA_BOUNCE_ATTR_LASTING | DMA_BOUNCE_ATTR_NO_MEMORY)

/* What iommu.bounce= says */
enum dma_bounce_mode {
	DMA_BOUNCE_DEFAULT,	/* nothing: use windows if there are any */
	DMA_BOUNCE_OFF,
	DMA_BOUNCE_AUTO,	/* devices whose driver opted in */
	DMA_BOUNCE_ALL,
};

static enum dma_bounce_mode dma_bounce_mode __ro_after_init;
static size_t dma_bounce_threshold_param __ro_after_init;

static const char * const dma_bounce_switch_names[] = { "auto", "on", "off" };

static int __init dma_bounce_setup(char *str)
{
	char *word, *end;
	size_t bytes;

	if (!str)
		return -EINVAL;
	while ((word = strsep(&str, ","))) {
		if (!strcmp(word, "off")) {
			dma_bounce_mode = DMA_BOUNCE_OFF;
		} else if (!strcmp(word, "auto")) {
			dma_bounce_mode = DMA_BOUNCE_AUTO;
		} else if (!strcmp(word, "all")) {
			dma_bounce_mode = DMA_BOUNCE_ALL;
		} else {
			bytes = memparse(word, &end);
			if (*end || end == word || !bytes) {
				pr_err("iommu.bounce: %s is not off, auto, all or a size\n", word);
				return -EINVAL;
			}
			dma_bounce_threshold_param = bytes;
			if (dma_bounce_mode == DMA_BOUNCE_DEFAULT)
				dma_bounce_mode = DMA_BOUNCE_AUTO;
		}
	}
	return 0;
}
early_param("iommu.bounce", dma_bounce_setup);

/**
 * dma_bounce_threshold_option - the threshold given at boot
 *
 * Return: bytes, or 0 if none was given.
 */
size_t dma_bounce_threshold_option(void)
{
	return dma_bounce_threshold_param;
}

/**
 * iommu_dma_bounce_allowed - may providers be used at all
 *
 * Return: false if iommu.bounce=off was given at boot.
 */
bool iommu_dma_bounce_allowed(void)
{
	return dma_bounce_mode != DMA_BOUNCE_OFF;
}
EXPORT_SYMBOL_GPL(iommu_dma_bounce_allowed);

static void dma_bounce_opt_out(void *data)
{
	struct device *dev = data;

	if (dev->iommu && dev->iommu->bounce)
		WRITE_ONCE(dev->iommu->bounce->opt_in, false);
}

/**
 * dma_bounce_opt_in - let small DMA of a device be bounced
 * @dev: the device, which is being probed
 *
 * To be called by drivers that keep the rules of the DMA API about who owns a buffer when: each
 * streaming mapping is unmapped or synchronised before the CPU looks at it. Ends when the driver is
 * unbound.
 */
void dma_bounce_opt_in(struct device *dev)
{
	if (!dev->iommu || !dev->iommu->bounce || devm_add_action(dev, dma_bounce_opt_out, dev))
		return;
	WRITE_ONCE(dev->iommu->bounce->opt_in, true);
}
EXPORT_SYMBOL_GPL(dma_bounce_opt_in);

static bool dma_bounce_wanted(struct device *dev)
{
	struct dma_bounce_device *bounce = dev->iommu->bounce;

	if (!bounce)
		return false;
	switch (READ_ONCE(bounce->choice)) {
	case DMA_BOUNCE_SWITCH_ON:
		return true;
	case DMA_BOUNCE_SWITCH_OFF:
		return false;
	default:
		return READ_ONCE(bounce->opt_in) || dma_bounce_mode == DMA_BOUNCE_ALL;
	}
}

static bool dma_bounce_untrusted(struct device *dev)
{
	return dev_is_pci(dev) && to_pci_dev(dev)->untrusted;
}

/* Copying */

/**
 * dma_bounce_copy - copy between memory that is mapped and a bounce buffer
 * @buffer: the bounce buffer
 * @phys: the memory
 * @len: bytes
 * @to_buffer: to the bounce buffer; otherwise from it
 */
void dma_bounce_copy(void *buffer, phys_addr_t phys, size_t len, bool to_buffer)
{
	size_t part, offset;
	void *va;

	if (!IS_ENABLED(CONFIG_HIGHMEM)) {
		va = phys_to_virt(phys);
		if (to_buffer)
			memcpy(buffer, va, len);
		else
			memcpy(va, buffer, len);
		return;
	}
	for (; len; len -= part, phys += part, buffer += part) {
		offset = offset_in_page(phys);
		part = min_t(size_t, len, PAGE_SIZE - offset);
		va = kmap_local_page(pfn_to_page(PHYS_PFN(phys)));
		if (to_buffer)
			memcpy(buffer, va + offset, part);
		else
			memcpy(va + offset, buffer, part);
		kunmap_local(va);
	}
}

/* Copies @len bytes of a list that start @skip bytes into it. */
static void copy_sg(void *slot, struct scatterlist *sgl, int nents, size_t skip, size_t len,
		    bool to_slot)
{
	struct scatterlist *s;
	size_t part;
	int i;

	for_each_sg(sgl, s, nents, i) {
		if (skip >= s->length) {
			skip -= s->length;
			slot += s->length;
			continue;
		}
		part = min_t(size_t, s->length - skip, len);
		dma_bounce_copy(slot + skip, sg_phys(s) + skip, part, to_slot);
		slot += s->length;
		len -= part;
		skip = 0;
		if (!len)
			break;
	}
}

static void slot_copy(struct dma_bounce_pool *pool, struct dma_bounce_slot *slot, size_t skip,
		      size_t len, bool to_slot)
{
	void *va = dma_bounce_slot_va(slot) + slot->offset;

	switch (slot->mapped) {
	case DMA_BOUNCE_SINGLE:
		dma_bounce_copy(va + skip, slot->phys + skip, len, to_slot);
		break;
	case DMA_BOUNCE_LIST:
		copy_sg(va, slot->sgl, slot->nents, skip, len, to_slot);
		break;
	default:
		dma_bounce_copy_request(va, slot->req, skip, len, to_slot);
	}
	dma_bounce_count(pool, to_slot ? DMA_BOUNCE_BYTES_IN : DMA_BOUNCE_BYTES_OUT, len);
}

/* Mapping */

static enum dma_bounce_kind dma_bounce_kind(enum dma_data_direction dir)
{
	switch (dir) {
	case DMA_TO_DEVICE:
		return DMA_BOUNCE_READ;
	case DMA_FROM_DEVICE:
		return DMA_BOUNCE_WRITE;
	default:
		return DMA_BOUNCE_RW;
	}
}

static const char * const dma_bounce_reasons[DMA_BOUNCE_STATS] = {
	[DMA_BOUNCE_FB_STARTING]	= "starting",
	[DMA_BOUNCE_FB_FULL]		= "full",
	[DMA_BOUNCE_FB_SIZE]		= "size",
	[DMA_BOUNCE_FB_LAYOUT]		= "layout",
	[DMA_BOUNCE_FB_MASK]		= "mask",
	[DMA_BOUNCE_FB_ATTRS]		= "attrs",
	[DMA_BOUNCE_FB_MEMORY]		= "memory",
};

static void count_fallback(struct dma_bounce_pool *pool, struct device *dev,
			   enum dma_bounce_stat reason)
{
	dma_bounce_count(pool, reason, 1);
	trace_dma_bounce_fallback(dev, dma_bounce_reasons[reason]);
}

static u64 dma_bounce_mask(struct device *dev)
{
	return min_not_zero(dma_get_mask(dev), dev->bus_dma_limit);
}

/*
 * Whether a mapping must bounce: the device is not trusted, and would see what else is in the
 * buffer's first and last page.
 */
static bool dma_bounce_required(struct dma_bounce_pool *pool, struct device *dev,
				phys_addr_t phys, size_t size)
{
	return dma_bounce_untrusted(dev) && iova_offset(pool->iovad, phys | size);
}

/* The pool that may serve mappings of a device, or NULL */
static struct dma_bounce_pool *pool_of_dev(struct device *dev)
{
	return dev_is_dma_coherent(dev) ? iommu_get_dma_domain(dev)->bounce : NULL;
}

/* Whether attributes let a mapping bounce; otherwise that is counted. */
static bool attrs_allow(struct dma_bounce_pool *pool, struct device *dev, unsigned long attrs)
{
	if (likely(!(attrs & DMA_BOUNCE_NEVER)))
		return true;
	count_fallback(pool, dev, DMA_BOUNCE_FB_ATTRS);
	return false;
}

/* Whether the pool has slots that the device can address; otherwise the reason is counted. */
static bool pool_usable(struct dma_bounce_pool *pool, struct device *dev)
{
	u64 mask = dma_bounce_mask(dev);

	if (!smp_load_acquire(&pool->slots.len)) {	/* pairs with dma_bounce_slots_open() */
		dma_bounce_pool_first_use(pool, mask);
		count_fallback(pool, dev, DMA_BOUNCE_FB_STARTING);
		return false;
	}
	if (pool->slots.base + pool->slots.len - 1 > mask) {
		count_fallback(pool, dev, DMA_BOUNCE_FB_MASK);
		return false;
	}
	return true;
}

/* Size in bytes up to which mappings of a device bounce */
static size_t dma_bounce_threshold(struct dma_bounce_pool *pool, struct device *dev)
{
	struct dma_bounce_device *bounce = dev->iommu->bounce;
	size_t own = bounce ? READ_ONCE(bounce->threshold) : 0;

	return own ?: READ_ONCE(pool->threshold);
}

/*
 * Takes a slot for @len bytes whose address has the low bits of @phys that the device needs. The
 * slot's address itself has none of these bits set, as it is aligned to its size.
 */
static struct dma_bounce_slot *slot_for_map(struct dma_bounce_pool *pool, struct device *dev,
					    phys_addr_t phys, size_t len, size_t limit,
					    enum dma_data_direction dir)
{
	size_t align = dma_get_min_align_mask(dev), offset = phys & align;
	struct dma_bounce_slot *slot;

	if (len > limit || align >= DMA_BOUNCE_MAX_SLOT || offset + len > DMA_BOUNCE_MAX_SLOT) {
		count_fallback(pool, dev, DMA_BOUNCE_FB_SIZE);
		return NULL;
	}
	slot = dma_bounce_pool_get(pool, dma_bounce_kind(dir), max(offset + len, align + 1));
	if (!slot) {
		count_fallback(pool, dev, DMA_BOUNCE_FB_FULL);
		return NULL;
	}
	slot->offset = offset;
	WRITE_ONCE(slot->len, len);
	return slot;
}

/* Has the sync calls of a device that has bounced reach us: a coherent device elides them. */
static void need_sync(struct dma_bounce_pool *pool, struct device *dev)
{
	if (likely(dma_dev_need_sync(dev)))
		return;
	dma_reset_need_sync(dev);
	dma_bounce_count(pool, DMA_BOUNCE_ELISION_LOST, 1);
}

/* Fills a slot at map. */
static void slot_fill(struct dma_bounce_pool *pool, struct device *dev,
		      struct dma_bounce_slot *slot, enum dma_data_direction dir,
		      unsigned long attrs)
{
	bool untrusted = dma_bounce_untrusted(dev);

	slot->no_copy_in = dir == DMA_FROM_DEVICE && !untrusted &&
			   (attrs & DMA_ATTR_BOUNCE_NO_COPY_IN);
	if (untrusted)
		memset(dma_bounce_slot_va(slot), 0, dma_bounce_slot_size(slot));
	if (!slot->no_copy_in)
		slot_copy(pool, slot, 0, slot->len, true);
	trace_dma_bounce_map(dev, dma_bounce_slot_iova(slot) + slot->offset, slot->len,
			     slot->nents, !slot->no_copy_in);
}

static dma_addr_t map_by_slot(struct dma_bounce_pool *pool, struct device *dev, phys_addr_t phys,
			      size_t size, size_t limit, enum dma_data_direction dir,
			      unsigned long attrs)
{
	dma_addr_t addr = DMA_MAPPING_ERROR;
	struct dma_bounce_slot *slot;

	rcu_read_lock();
	slot = slot_for_map(pool, dev, phys, size, limit, dir);
	if (slot) {
		slot->phys = phys;
		slot->nents = 0;
		slot->mapped = DMA_BOUNCE_SINGLE;
		slot_fill(pool, dev, slot, dir, attrs);
		addr = dma_bounce_slot_iova(slot) + slot->offset;
		dma_bounce_count(pool, DMA_BOUNCE_PAGES, 1);
	}
	rcu_read_unlock();
	return addr;
}

/**
 * __dma_bounce_map_page - map a buffer by a slot
 * @dev: the device
 * @phys: the buffer
 * @size: its bytes
 * @dir: direction of the transfer
 * @attrs: attributes of the mapping
 *
 * Return: the address for the device, or DMA_MAPPING_ERROR if the buffer does not bounce.
 */
dma_addr_t __dma_bounce_map_page(struct device *dev, phys_addr_t phys, size_t size,
				 enum dma_data_direction dir, unsigned long attrs)
{
	struct dma_bounce_pool *pool = pool_of_dev(dev);
	dma_addr_t addr = DMA_MAPPING_ERROR;
	bool required;
	size_t limit;

	if (!pool || !size)
		return addr;
	required = dma_bounce_required(pool, dev, phys, size);
	if ((!required && !dma_bounce_wanted(dev)) || !attrs_allow(pool, dev, attrs))
		return addr;
	if (!pfn_valid(PHYS_PFN(phys)) || is_zone_device_page(pfn_to_page(PHYS_PFN(phys)))) {
		count_fallback(pool, dev, DMA_BOUNCE_FB_MEMORY);
		return addr;
	}
	limit = required ? DMA_BOUNCE_MAX_SLOT : dma_bounce_threshold(pool, dev);
	if (pool_usable(pool, dev))
		addr = map_by_slot(pool, dev, phys, size, limit, dir, attrs);
	if (addr == DMA_MAPPING_ERROR && required)
		addr = dma_bounce_single_map(pool, dma_bounce_mask(dev), phys, size, dir, attrs);
	if (addr != DMA_MAPPING_ERROR)
		need_sync(pool, dev);
	return addr;
}

/* Bytes of a list if it can be packed into one slot, otherwise 0 with the reason counted */
static size_t sg_packable(struct dma_bounce_pool *pool, struct device *dev,
			  struct scatterlist *sgl, int nents, size_t limit)
{
	unsigned int align = dma_get_min_align_mask(dev), max_seg = dma_get_max_seg_size(dev);
	size_t len = 0;
	phys_addr_t start = sg_phys(sgl);
	struct scatterlist *s;
	int i;

	for_each_sg(sgl, s, nents, i) {
		if (is_zone_device_page(sg_page(s))) {
			count_fallback(pool, dev, DMA_BOUNCE_FB_MEMORY);
			return 0;
		}
		/* Each piece follows the one before it: are its low bits the right ones then? */
		if (!s->length || s->length > max_seg || ((start + len) ^ sg_phys(s)) & align) {
			count_fallback(pool, dev, DMA_BOUNCE_FB_LAYOUT);
			return 0;
		}
		len += s->length;
		if (len > limit) {
			count_fallback(pool, dev, DMA_BOUNCE_FB_SIZE);
			return 0;
		}
	}
	/* A slot is aligned to its size and never crosses a boundary that is not below that. */
	if (dma_get_seg_boundary(dev) < DMA_BOUNCE_MAX_SLOT - 1) {
		count_fallback(pool, dev, DMA_BOUNCE_FB_LAYOUT);
		return 0;
	}
	return len;
}

/* Writes the DMA segments into the list: one, or as few as max_seg_size allows. */
static int sg_fill_dma(struct device *dev, struct scatterlist *sgl, int nents, dma_addr_t addr)
{
	unsigned int max_seg = dma_get_max_seg_size(dev), seg_len = 0;
	struct scatterlist *s, *seg = NULL;
	int i, count = 0;

	for_each_sg(sgl, s, nents, i) {
		unsigned int len = s->length;

		sg_dma_address(s) = DMA_MAPPING_ERROR;
		sg_dma_len(s) = 0;
		if (!seg || max_seg - seg_len < len) {
			seg = seg ? sg_next(seg) : sgl;
			sg_dma_address(seg) = addr;
			seg_len = 0;
			count++;
		}
		seg_len += len;
		sg_dma_len(seg) = seg_len;
		addr += len;
	}
	return count;
}

/**
 * __dma_bounce_map_sg - map a whole list by one slot
 * @dev: the device
 * @sgl: the list
 * @nents: its entries
 * @dir: direction of the transfer
 * @attrs: attributes of the mapping
 *
 * Return: the number of DMA segments, or 0 if the list does not bounce.
 */
int __dma_bounce_map_sg(struct device *dev, struct scatterlist *sgl, int nents,
			enum dma_data_direction dir, unsigned long attrs)
{
	struct dma_bounce_pool *pool = pool_of_dev(dev);
	struct dma_bounce_slot *slot;
	size_t len, limit;
	int count = 0;

	if (nents < 1)
		return 0;
	/*
	 * Whatever an earlier mapping of the list left here must not make the sync call within
	 * iommu_dma_map_sg() take it for a bounced one.
	 */
	sg_dma_address(sgl) = DMA_MAPPING_ERROR;
	/* Lists of untrusted devices that do not bounce as a whole come back here by entry. */
	if (!pool || !dma_bounce_wanted(dev) || !attrs_allow(pool, dev, attrs) ||
	    !pool_usable(pool, dev))
		return 0;
	limit = dma_bounce_threshold(pool, dev);
	len = sg_packable(pool, dev, sgl, nents, limit);
	if (!len)
		return 0;
	rcu_read_lock();
	slot = slot_for_map(pool, dev, sg_phys(sgl), len, limit, dir);
	if (slot) {
		slot->sgl = sgl;
		slot->nents = nents;
		slot->mapped = DMA_BOUNCE_LIST;
		slot_fill(pool, dev, slot, dir, attrs);
		count = sg_fill_dma(dev, sgl, nents, dma_bounce_slot_iova(slot) + slot->offset);
		dma_bounce_count(pool, DMA_BOUNCE_LISTS, 1);
		need_sync(pool, dev);
	}
	rcu_read_unlock();
	return count;
}

#ifdef CONFIG_IOMMU_DMA_BOUNCE_REQUEST

/**
 * dma_bounce_map_request - map all data of a block request by one slot
 * @dev: the device
 * @req: the request
 * @attrs: attributes of the mapping
 *
 * Return: the address for the device of all of it, or DMA_MAPPING_ERROR if it does not bounce as a
 * whole; its parts may.
 */
dma_addr_t dma_bounce_map_request(struct device *dev, struct request *req, unsigned long attrs)
{
	dma_addr_t addr = DMA_MAPPING_ERROR;
	struct dma_bounce_pool *pool;
	struct dma_bounce_slot *slot;
	enum dma_bounce_stat reason;
	phys_addr_t start;
	size_t len, limit;

	if (!static_branch_unlikely(&dma_bounce_key) || !use_dma_iommu(dev))
		return addr;
	pool = pool_of_dev(dev);
	if (!pool || !dma_bounce_wanted(dev) || !attrs_allow(pool, dev, attrs) ||
	    !pool_usable(pool, dev))
		return addr;
	limit = dma_bounce_threshold(pool, dev);
	len = dma_bounce_request_packable(dev, req, limit, &start, &reason);
	if (!len) {
		count_fallback(pool, dev, reason);
		return addr;
	}
	rcu_read_lock();
	slot = slot_for_map(pool, dev, start, len, limit, rq_dma_dir(req));
	if (slot) {
		slot->req = req;
		slot->nents = 0;
		slot->mapped = DMA_BOUNCE_REQUEST;
		slot_fill(pool, dev, slot, rq_dma_dir(req), attrs);
		addr = dma_bounce_slot_iova(slot) + slot->offset;
		dma_bounce_count(pool, DMA_BOUNCE_REQUESTS, 1);
		need_sync(pool, dev);
	}
	rcu_read_unlock();
	return addr;
}
EXPORT_SYMBOL_GPL(dma_bounce_map_request);

#endif /* CONFIG_IOMMU_DMA_BOUNCE_REQUEST */

/* Unmapping and synchronising */

/* Copies back what is to be copied back, and frees the slot. */
static void slot_finish(struct dma_bounce_pool *pool, struct device *dev,
			struct dma_bounce_slot *slot, unsigned long attrs)
{
	bool copy = slot->chunk->kind != DMA_BOUNCE_READ && !(attrs & DMA_ATTR_SKIP_CPU_SYNC) &&
		    READ_ONCE(slot->chunk->state) != DMA_BOUNCE_DEAD;

	if (copy && slot->no_copy_in && !(attrs & DMA_ATTR_BOUNCE_ALL_WRITTEN)) {
		dma_bounce_count(pool, DMA_BOUNCE_UNWRITTEN, 1);
		copy = false;
	}
	if (copy)
		slot_copy(pool, slot, 0, slot->len, false);
	trace_dma_bounce_unmap(dev, dma_bounce_slot_iova(slot) + slot->offset, slot->len,
			       slot->nents, copy);
	dma_bounce_slots_put(&pool->slots, slot);
}

/**
 * __dma_bounce_unmap_page - unmap a buffer
 * @dev: the device
 * @addr: what mapping it returned
 * @attrs: attributes of the unmapping
 *
 * Return: true if the address was one of a pool, so that nothing is left to do.
 */
bool __dma_bounce_unmap_page(struct device *dev, dma_addr_t addr, unsigned long attrs)
{
	struct dma_bounce_pool *pool = iommu_get_dma_domain(dev)->bounce;
	struct dma_bounce_slot *slot;

	if (!pool)
		return false;
	if (!dma_bounce_owns(pool, addr))
		return dma_bounce_single_unmap(pool, addr, attrs);
	rcu_read_lock();
	slot = dma_bounce_slots_find(&pool->slots, addr);
	if (!dev_WARN_ONCE(dev, !slot || slot->mapped != DMA_BOUNCE_SINGLE ||
			   addr != dma_bounce_slot_iova(slot) + slot->offset,
			   "unmaps a bounced address that is not mapped: %pad\n", &addr))
		slot_finish(pool, dev, slot, attrs);
	rcu_read_unlock();
	return true;
}

#ifdef CONFIG_IOMMU_DMA_BOUNCE_REQUEST

/**
 * dma_bounce_unmap_request - unmap all data of a block request, which is not completed yet
 * @dev: the device
 * @addr: what dma_bounce_map_request() returned
 * @attrs: attributes of the unmapping
 */
void dma_bounce_unmap_request(struct device *dev, dma_addr_t addr, unsigned long attrs)
{
	struct dma_bounce_pool *pool = iommu_get_dma_domain(dev)->bounce;
	struct dma_bounce_slot *slot = NULL;

	rcu_read_lock();
	if (pool && dma_bounce_owns(pool, addr))
		slot = dma_bounce_slots_find(&pool->slots, addr);
	if (!dev_WARN_ONCE(dev, !slot || slot->mapped != DMA_BOUNCE_REQUEST,
			   "unmaps a bounced request that is not mapped: %pad\n", &addr))
		slot_finish(pool, dev, slot, attrs);
	rcu_read_unlock();
}
EXPORT_SYMBOL_GPL(dma_bounce_unmap_request);

#endif /* CONFIG_IOMMU_DMA_BOUNCE_REQUEST */

/**
 * __dma_bounce_unmap_sg - unmap a list
 * @dev: the device
 * @sgl: the list
 * @nents: its entries when it was mapped
 * @attrs: attributes of the unmapping
 *
 * Return: true if the list was mapped by a slot; false for any other, among them lists each entry
 * of which has a slot of its own because swiotlb's users map them so.
 */
bool __dma_bounce_unmap_sg(struct device *dev, struct scatterlist *sgl, int nents,
			   unsigned long attrs)
{
	struct dma_bounce_pool *pool = iommu_get_dma_domain(dev)->bounce;
	dma_addr_t addr = sg_dma_address(sgl);
	struct dma_bounce_slot *slot;
	bool ours = false;

	if (!pool || !dma_bounce_owns(pool, addr))
		return false;
	rcu_read_lock();
	slot = dma_bounce_slots_find(&pool->slots, addr);
	if (dev_WARN_ONCE(dev, !slot, "unmaps a bounced list that is not mapped: %pad\n", &addr)) {
		ours = true;
	} else if (slot->mapped == DMA_BOUNCE_LIST) {
		/* The list may be a copy of the one that was mapped, which may be gone. */
		slot->sgl = sgl;
		if (dev_WARN_ONCE(dev, nents != slot->nents, "unmaps %d of %u entries\n", nents,
				  slot->nents))
			slot->nents = min_t(unsigned int, nents, slot->nents);
		slot_finish(pool, dev, slot, attrs);
		sg_dma_address(sgl) = DMA_MAPPING_ERROR;
		ours = true;
	}
	rcu_read_unlock();
	return ours;
}

/* Copies part of a mapped slot. */
static void slot_sync(struct dma_bounce_pool *pool, struct device *dev,
		      struct dma_bounce_slot *slot, size_t skip, size_t len, bool for_device)
{
	bool copy = for_device || slot->chunk->kind != DMA_BOUNCE_READ;

	dma_bounce_count(pool, DMA_BOUNCE_SYNCS, 1);
	if (READ_ONCE(slot->chunk->state) == DMA_BOUNCE_DEAD)
		return;
	/*
	 * What the CPU wrote is copied whatever the direction, as at map. Nothing comes back from a
	 * slot that the device cannot write, or that it may not have written all of.
	 */
	if (!for_device && copy && WARN_ON_ONCE(slot->no_copy_in))
		copy = false;
	if (copy)
		slot_copy(pool, slot, skip, len, for_device);
	trace_dma_bounce_sync(dev, dma_bounce_slot_iova(slot) + slot->offset + skip, len,
			      for_device, copy);
}

/**
 * __dma_bounce_sync_single - synchronise part of a mapped buffer
 * @dev: the device
 * @addr: where in the mapping the part starts
 * @size: its bytes
 * @for_device: copy to the slot; otherwise from it
 *
 * Return: true if the address was one of a pool.
 */
bool __dma_bounce_sync_single(struct device *dev, dma_addr_t addr, size_t size, bool for_device)
{
	struct dma_bounce_pool *pool = iommu_get_dma_domain(dev)->bounce;
	struct dma_bounce_slot *slot;
	dma_addr_t start;

	if (!pool)
		return false;
	if (!dma_bounce_owns(pool, addr)) {
		if (dma_bounce_single_sync(pool, addr, size, for_device))
			return true;
		dma_bounce_count(pool, DMA_BOUNCE_SYNCS_PLAIN, 1);
		return false;
	}
	rcu_read_lock();
	slot = dma_bounce_slots_find(&pool->slots, addr);
	if (dev_WARN_ONCE(dev, !slot, "syncs a bounced address that is not mapped: %pad\n", &addr))
		goto out;
	start = dma_bounce_slot_iova(slot) + slot->offset;
	if (dev_WARN_ONCE(dev, addr < start || addr - start > slot->len ||
			  size > slot->len - (addr - start),
			  "syncs %zu bytes at %pad of a mapping of %u at %pad\n", size, &addr,
			  slot->len, &start))
		goto out;
	slot_sync(pool, dev, slot, addr - start, size, for_device);
out:
	rcu_read_unlock();
	return true;
}

/**
 * __dma_bounce_sync_sg - synchronise a mapped list, or its first entries
 * @dev: the device
 * @sgl: the list
 * @nents: entries to synchronise
 * @for_device: copy to the slot; otherwise from it
 *
 * Lengths are those of the entries: DMA lengths of a packed list mean nothing after the first.
 *
 * Return: true if the list was mapped by a slot.
 */
bool __dma_bounce_sync_sg(struct device *dev, struct scatterlist *sgl, int nents, bool for_device)
{
	struct dma_bounce_pool *pool = iommu_get_dma_domain(dev)->bounce;
	struct dma_bounce_slot *slot;
	struct scatterlist *s;
	bool ours = false;
	size_t len = 0;
	int i;

	if (!pool || !dma_bounce_owns(pool, sg_dma_address(sgl)))
		return false;
	rcu_read_lock();
	slot = dma_bounce_slots_find(&pool->slots, sg_dma_address(sgl));
	if (slot && slot->mapped == DMA_BOUNCE_LIST) {
		ours = true;
		for_each_sg(sgl, s, min_t(unsigned int, nents, slot->nents), i)
			len += s->length;
		slot->sgl = sgl;
		slot_sync(pool, dev, slot, 0, min_t(size_t, len, slot->len), for_device);
	}
	rcu_read_unlock();
	return ours;
}

/* Set-up */

static ssize_t iommu_bounce_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	unsigned int i, now = READ_ONCE(dev->iommu->bounce->choice), n = 0;

	for (i = 0; i < ARRAY_SIZE(dma_bounce_switch_names); i++)
		n += sysfs_emit_at(buf, n, i == now ? "[%s] " : "%s ", dma_bounce_switch_names[i]);
	return n + sysfs_emit_at(buf, n, "\n");
}

static ssize_t iommu_bounce_store(struct device *dev, struct device_attribute *attr,
				  const char *buf, size_t len)
{
	int i = sysfs_match_string(dma_bounce_switch_names, buf);

	if (i < 0)
		return i;
	WRITE_ONCE(dev->iommu->bounce->choice, i);
	return len;
}
static DEVICE_ATTR_RW(iommu_bounce);

static ssize_t iommu_bounce_threshold_show(struct device *dev, struct device_attribute *attr,
					   char *buf)
{
	return sysfs_emit(buf, "%u\n", READ_ONCE(dev->iommu->bounce->threshold));
}

static ssize_t iommu_bounce_threshold_store(struct device *dev, struct device_attribute *attr,
					    const char *buf, size_t len)
{
	unsigned long long bytes;
	char *end;

	bytes = memparse(buf, &end);
	if (end == buf || (*end && *end != '\n') || bytes > DMA_BOUNCE_MAX_SLOT)
		return -EINVAL;
	WRITE_ONCE(dev->iommu->bounce->threshold, bytes);
	return len;
}
static DEVICE_ATTR_RW(iommu_bounce_threshold);

static struct attribute *dma_bounce_attrs[] = {
	&dev_attr_iommu_bounce.attr,
	&dev_attr_iommu_bounce_threshold.attr,
	NULL
};

static const struct attribute_group dma_bounce_group = {
	.attrs	= dma_bounce_attrs,
};

/* Makes what is known of a device, unless it is there already. */
static bool init_device(struct device *dev)
{
	if (!dev->iommu->bounce)
		dev->iommu->bounce = kzalloc(sizeof(*dev->iommu->bounce), GFP_KERNEL);
	if (!dev->iommu->bounce)
		return false;
	if (!dev->iommu->bounce->files)
		dev->iommu->bounce->files = !device_add_group(dev, &dma_bounce_group);
	return true;
}

/**
 * dma_bounce_init_domain - a device got a DMA domain
 * @domain: the domain
 * @dev: the device
 * @iovad: the domain's IOVA allocator
 *
 * Makes the domain's pool if windows are offered or the boot option asks for it, and the device's
 * switch in sysfs. Calls for one domain are serialised by its group's mutex.
 */
void dma_bounce_init_domain(struct iommu_domain *domain, struct device *dev,
			    struct iova_domain *iovad)
{
	const struct iommu_bounce_ops *ops = domain->ops->bounce_ops;
	struct iommu_bounce_limits limits = {};

	if (!iommu_dma_bounce_allowed())
		return;
	if (!ops || ops->limits(domain, &limits)) {
		if (dma_bounce_mode == DMA_BOUNCE_DEFAULT)
			return;
		ops = &dma_bounce_page_ops;
	}
	if (!init_device(dev))
		return;
	if (!domain->bounce) {
		domain->bounce = dma_bounce_pool_create(domain, iovad, ops, dev_name(dev));
		if (!domain->bounce)
			return;
		static_branch_enable(&dma_bounce_key);
	}
}

/**
 * dma_bounce_free_domain - a DMA domain goes away
 * @domain: the domain, which has no devices any more
 */
void dma_bounce_free_domain(struct iommu_domain *domain)
{
	struct dma_bounce_pool *pool = domain->bounce;

	if (!pool)
		return;
	dma_bounce_pool_destroy(pool);
	domain->bounce = NULL;
}

/**
 * dma_bounce_release_device - a device leaves its IOMMU
 * @dev: the device
 */
void dma_bounce_release_device(struct device *dev)
{
	struct dma_bounce_device *bounce = dev->iommu ? dev->iommu->bounce : NULL;

	if (!bounce)
		return;
	if (bounce->files)
		device_remove_group(dev, &dma_bounce_group);
	dev->iommu->bounce = NULL;
	kfree(bounce);
}
