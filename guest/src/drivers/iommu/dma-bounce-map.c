// SPDX-License-Identifier: GPL-2.0-only
/*
 * Bouncing of small DMA: mapping, unmapping and synchronising by slots
 *
 * dma-iommu.c calls these functions first. If they decline, it maps the ordinary way. An address
 * belongs to a pool if it is in the pool's range. Nothing else tells this, because scatterlists
 * have no mark for bounced mappings.
 */

#include <linux/device.h>
#include <linux/dma-map-ops.h>
#include <linux/iommu-dma.h>
#include <linux/iova.h>
#include <linux/memremap.h>
#include <linux/scatterlist.h>
#include <linux/swiotlb.h>

#include "dma-bounce-copy.h"
#include "dma-bounce-lend.h"
#include "dma-bounce-map.h"
#include "dma-bounce-single.h"
#include "dma-bounce-take.h"

/*
 * Returns true if a mapping must bounce: the device is untrusted, and would see other data in the
 * first or last page of the buffer.
 */
static bool dma_bounce_required(struct dma_bounce_pool *pool, struct device *dev,
				phys_addr_t phys, size_t size)
{
	return dma_bounce_untrusted(dev) && iova_offset(pool->iovad, phys | size);
}

static dma_addr_t map_by_slot(struct dma_bounce_pool *pool, struct device *dev, phys_addr_t phys,
			      size_t size, size_t limit, enum dma_data_direction dir,
			      unsigned long attrs)
{
	dma_addr_t addr = DMA_MAPPING_ERROR;
	struct dma_bounce_slot *slot;

	rcu_read_lock();
	slot = dma_bounce_slot_take(pool, dev, phys, size, limit, dir, DMA_BOUNCE_SINGLE);
	if (slot) {
		slot->phys = phys;
		slot->nents = 0;
		dma_bounce_slot_fill(pool, dev, slot, dir, attrs);
		addr = dma_bounce_slot_iova(slot) + slot->offset;
	}
	rcu_read_unlock();
	return addr;
}

/**
 * __dma_bounce_map_page - map a buffer by a slot
 * @dev: the device
 * @phys: address of the buffer, which has pages
 * @size: length of the buffer in bytes
 * @dir: direction of the transfer
 * @attrs: attributes of the mapping
 * @addr: set to the address for the device, or to DMA_MAPPING_ERROR
 *
 * Return: false if the caller must map the buffer. If true and @addr is DMA_MAPPING_ERROR, the
 * buffer must not be mapped.
 */
bool __dma_bounce_map_page(struct device *dev, phys_addr_t phys, size_t size,
			   enum dma_data_direction dir, unsigned long attrs, dma_addr_t *addr)
{
	struct dma_bounce_pool *pool = dma_bounce_pool_in(dev);
	struct page *page = pfn_to_page(PHYS_PFN(phys));
	bool lent = dma_bounce_is_lent(page), required;
	size_t limit;

	*addr = DMA_MAPPING_ERROR;
	/* Memory that was lent for another device must not be mapped for this device. */
	if (!pool || !size || (lent && !dma_bounce_is_on_loan(page)))
		return lent;
	if (lent && dma_bounce_usable(pool, dev)) {
		*addr = dma_bounce_lent_map(pool, phys, size);
		if (*addr != DMA_MAPPING_ERROR)
			return true;
	}
	required = lent || dma_bounce_required(pool, dev, phys, size);
	if ((!required && !dma_bounce_wanted(dev)) || !dma_bounce_attrs_allow(pool, dev, attrs))
		return lent;
	if (!lent && !dma_bounce_can_copy(page)) {
		dma_bounce_fallback(pool, dev, DMA_BOUNCE_FB_MEMORY);
		return false;
	}
	limit = required ? DMA_BOUNCE_MAX_SLOT : dma_bounce_threshold(pool, dev, dir);
	if (dma_bounce_usable(pool, dev))
		*addr = map_by_slot(pool, dev, phys, size, limit, dir, attrs);
	if (*addr == DMA_MAPPING_ERROR && required)
		*addr = dma_bounce_single_map(pool, dma_bounce_mask(dev), phys, size, dir, attrs);
	if (*addr != DMA_MAPPING_ERROR)
		dma_bounce_reset_need_sync(pool, dev);
	/* The caller can still bounce a buffer of an untrusted device by swiotlb. */
	return *addr != DMA_MAPPING_ERROR || lent || (required && !is_swiotlb_active(dev));
}

/**
 * __dma_bounce_by_piece - check if the pieces of a larger mapping must be mapped one by one
 * @dev: the device
 *
 * Return: true for an untrusted device, because pieces that do not fill their pages must bounce.
 */
bool __dma_bounce_by_piece(struct device *dev)
{
	return dma_bounce_untrusted(dev) && dma_bounce_pool_in(dev);
}

static bool sg_has_lent(struct scatterlist *sgl, int nents)
{
	struct scatterlist *s;
	int i;

	for_each_sg(sgl, s, nents, i)
		if (dma_bounce_is_on_loan(sg_page(s)))
			return true;
	return false;
}

/**
 * __dma_bounce_by_entry - check if the entries of a list must be mapped one by one
 * @dev: the device
 * @sgl: the list, which did not bounce as a whole
 * @nents: number of entries
 *
 * Return: true if the list contains lent memory. Lent memory already has an address for the device,
 * or must be copied.
 */
bool __dma_bounce_by_entry(struct device *dev, struct scatterlist *sgl, int nents)
{
	return dma_bounce_lends() && dma_bounce_pool_in(dev) && sg_has_lent(sgl, nents);
}

/* Returns the length of a list that one slot can hold. Otherwise counts why, and returns 0. */
static size_t sg_packable(struct dma_bounce_pool *pool, struct device *dev,
			  struct scatterlist *sgl, int nents, size_t limit)
{
	unsigned int align = dma_get_min_align_mask(dev), max_seg = dma_get_max_seg_size(dev);
	size_t len = 0;
	phys_addr_t start = sg_phys(sgl);
	struct scatterlist *s;
	int i;

	for_each_sg(sgl, s, nents, i) {
		if (dma_bounce_is_lent(sg_page(s)))
			return 0;
		if (!dma_bounce_can_copy(sg_page(s))) {
			dma_bounce_fallback(pool, dev, DMA_BOUNCE_FB_MEMORY);
			return 0;
		}
		/* Entries are packed without gaps. Check that the address keeps its low bits. */
		if (!s->length || s->length > max_seg || ((start + len) ^ sg_phys(s)) & align) {
			dma_bounce_fallback(pool, dev, DMA_BOUNCE_FB_LAYOUT);
			return 0;
		}
		len += s->length;
		if (len > limit) {
			dma_bounce_fallback(pool, dev, DMA_BOUNCE_FB_SIZE);
			return 0;
		}
	}
	/* A slot is aligned to its size, so it only crosses segment boundaries below its size. */
	if (dma_get_seg_boundary(dev) < DMA_BOUNCE_MAX_SLOT - 1) {
		dma_bounce_fallback(pool, dev, DMA_BOUNCE_FB_LAYOUT);
		return 0;
	}
	return len;
}

/*
 * Writes the DMA segments into the list: one segment, or more if max_seg_size requires it. Entries
 * after the last segment get a DMA length of 0, which some users take for the end. They also get no
 * address, because an address of an earlier mapping may now belong to another list.
 */
static int sg_fill_dma(struct device *dev, struct scatterlist *sgl, int nents, dma_addr_t addr,
		       size_t len)
{
	unsigned int max_seg = dma_get_max_seg_size(dev), seg_len = len;
	struct scatterlist *s, *seg = sgl;
	int i, count = 1;

	if (unlikely(len > max_seg))
		seg_len = 0;
	for_each_sg(sgl, s, nents, i) {
		if (i) {
			sg_dma_address(s) = DMA_MAPPING_ERROR;
			sg_dma_len(s) = 0;
		} else {
			sg_dma_address(s) = addr;
		}
		if (likely(len <= max_seg))
			continue;
		if (max_seg - seg_len < s->length) {
			sg_dma_len(seg) = seg_len;
			seg = sg_next(seg);
			sg_dma_address(seg) = addr;
			seg_len = 0;
			count++;
		}
		seg_len += s->length;
		addr += s->length;
	}
	sg_dma_len(seg) = seg_len;
	return count;
}

/**
 * __dma_bounce_map_sg - map a whole list by one slot
 * @dev: the device
 * @sgl: the list
 * @nents: number of entries
 * @dir: direction of the transfer
 * @attrs: attributes of the mapping
 *
 * Return: the number of DMA segments, or 0 if the list does not bounce.
 */
int __dma_bounce_map_sg(struct device *dev, struct scatterlist *sgl, int nents,
			enum dma_data_direction dir, unsigned long attrs)
{
	struct dma_bounce_pool *pool;
	struct dma_bounce_slot *slot;
	size_t len, limit;
	int count = 0;

	if (nents < 1)
		return 0;
	/*
	 * Clear the address of an earlier mapping. Otherwise the sync call in iommu_dma_map_sg()
	 * could take the list for a bounced list.
	 */
	sg_dma_address(sgl) = DMA_MAPPING_ERROR;
	/* If the list of an untrusted device does not bounce here, each entry is mapped alone. */
	pool = dma_bounce_pool_for(dev, attrs);
	if (!pool)
		return 0;
	limit = dma_bounce_threshold(pool, dev, dir);
	len = sg_packable(pool, dev, sgl, nents, limit);
	if (!len)
		return 0;
	rcu_read_lock();
	slot = dma_bounce_slot_take(pool, dev, sg_phys(sgl), len, limit, dir,
				    nents == 1 ? DMA_BOUNCE_ENTRY : DMA_BOUNCE_LIST);
	if (slot) {
		slot->nents = nents;
		/*
		 * At a sync call, a list with one entry may no longer exist on the caller's stack.
		 */
		if (nents == 1)
			slot->phys = sg_phys(sgl);
		else
			slot->sgl = sgl;
		dma_bounce_slot_fill(pool, dev, slot, dir, attrs);
		count = sg_fill_dma(dev, sgl, nents, dma_bounce_slot_iova(slot) + slot->offset,
				    len);
		dma_bounce_reset_need_sync(pool, dev);
	}
	rcu_read_unlock();
	return count;
}

/* Unmapping and synchronising */

/*
 * Returns true if an address outside the pool's range may belong to a buffer for one mapping. For
 * most devices, this function does not read the pool.
 */
static __always_inline bool may_be_single(struct dma_bounce_pool *pool, struct device *dev)
{
	return (dma_bounce_untrusted(dev) || dma_bounce_lends()) &&
	       atomic_read(&pool->nsingle_use);
}

/**
 * dma_bounce_need_sync - check if a mapping of a device in a DMA domain needs sync calls
 * @dev: a device that has had bounced mappings
 * @addr: an address in the mapping
 *
 * Return: true for bounced mappings, also by swiotlb, and for devices that are not coherent.
 */
bool dma_bounce_need_sync(struct device *dev, dma_addr_t addr)
{
	struct dma_bounce_pool *pool = dma_bounce_pool_of(dev);

	return !pool || !dev_is_dma_coherent(dev) || dma_bounce_untrusted(dev) ||
	       dma_bounce_owns(pool, addr) || may_be_single(pool, dev);
}

static bool serves_list(struct dma_bounce_slot *slot)
{
	return slot->mapped == DMA_BOUNCE_LIST || slot->mapped == DMA_BOUNCE_ENTRY;
}

/*
 * Returns true if an address without a slot is in lent memory. Such memory needs no copy, and stays
 * mapped.
 */
static bool is_lent(struct dma_bounce_pool *pool, dma_addr_t addr)
{
	return dma_bounce_slots_whole(&pool->slots, addr);
}

/* Returns true if a list starts where the slot's mapping starts. Otherwise warns. */
static bool is_list_of(struct device *dev, struct scatterlist *sgl, struct dma_bounce_slot *slot)
{
	dma_addr_t addr = sg_dma_address(sgl);

	return !dev_WARN_ONCE(dev, addr != dma_bounce_slot_iova(slot) + slot->offset,
			      "not the start of a bounced list: %pad\n", &addr);
}

/**
 * __dma_bounce_unmap_page - unmap a buffer
 * @dev: the device
 * @addr: address that the mapping function returned
 * @attrs: attributes of the unmapping
 *
 * Return: true if the address belongs to a pool, so that the caller has nothing to do.
 */
bool __dma_bounce_unmap_page(struct device *dev, dma_addr_t addr, unsigned long attrs)
{
	struct dma_bounce_pool *pool = dma_bounce_pool_of(dev);
	struct dma_bounce_slot *slot;

	if (!pool)
		return false;
	if (!dma_bounce_owns(pool, addr))
		return may_be_single(pool, dev) && dma_bounce_single_unmap(pool, addr, attrs);
	rcu_read_lock();
	slot = dma_bounce_slots_find(&pool->slots, addr);
	if (!slot && is_lent(pool, addr))
		goto out;
	/* A list with one entry may be unmapped as a single buffer. */
	if (!dev_WARN_ONCE(dev, !slot || slot->mapped > DMA_BOUNCE_ENTRY ||
			   addr != dma_bounce_slot_iova(slot) + slot->offset,
			   "unmaps a bounced address that is not mapped: %pad\n", &addr))
		dma_bounce_slot_finish(pool, dev, slot, NULL, attrs);
out:
	rcu_read_unlock();
	return true;
}

/*
 * Returns true if a list may be one buffer that was mapped as a single buffer. Mainline allows
 * callers to unmap such a buffer as a list with one entry. Lists that are marked as bounced by
 * swiotlb are excluded, because they are unmapped entry by entry.
 */
static bool is_lone_buffer(struct scatterlist *sgl, int nents)
{
	return nents == 1 && !sg_dma_is_swiotlb(sgl);
}

/**
 * __dma_bounce_unmap_sg - unmap a list
 * @dev: the device
 * @sgl: the list
 * @nents: number of entries when the list was mapped
 * @attrs: attributes of the unmapping
 *
 * Return: true if the list was mapped by one slot. False for other lists, also for lists whose
 * entries were mapped one by one, like lists that bounce by swiotlb.
 */
bool __dma_bounce_unmap_sg(struct device *dev, struct scatterlist *sgl, int nents,
			   unsigned long attrs)
{
	struct dma_bounce_pool *pool = dma_bounce_pool_of(dev);
	dma_addr_t addr = sg_dma_address(sgl);
	struct dma_bounce_slot *slot;
	bool ours = true;

	if (!pool)
		return false;
	if (!dma_bounce_owns(pool, addr))
		return may_be_single(pool, dev) && is_lone_buffer(sgl, nents) &&
		       dma_bounce_single_unmap(pool, addr, attrs);
	rcu_read_lock();
	slot = dma_bounce_slots_find(&pool->slots, addr);
	if (!slot && is_lent(pool, addr)) {
		ours = is_lone_buffer(sgl, nents);
		goto out;
	}
	if (dev_WARN_ONCE(dev, !slot, "unmaps a bounced list that is not mapped: %pad\n", &addr))
		goto out;
	if (serves_list(slot)) {
		if (!is_list_of(dev, sgl, slot))
			goto out;
		if (dev_WARN_ONCE(dev, nents != slot->nents, "unmaps %d of %u entries\n", nents,
				  slot->nents))
			slot->nents = min_t(unsigned int, nents, slot->nents);
		dma_bounce_slot_finish(pool, dev, slot, sgl, attrs);
		sg_dma_address(sgl) = DMA_MAPPING_ERROR;
	} else if (is_lone_buffer(sgl, nents)) {
		if (is_list_of(dev, sgl, slot))
			dma_bounce_slot_finish(pool, dev, slot, NULL, attrs);
	} else {
		ours = false;
	}
out:
	rcu_read_unlock();
	return ours;
}

/* Not inlined, so that sync calls for mappings that did not bounce do not save registers. */
static noinline bool sync_single(struct dma_bounce_pool *pool, struct device *dev, dma_addr_t addr,
				 size_t size, enum dma_data_direction dir, bool for_device)
{
	struct dma_bounce_slot *slot;
	dma_addr_t start;
	size_t inside;

	rcu_read_lock();
	slot = dma_bounce_slots_find(&pool->slots, addr);
	if (!slot && is_lent(pool, addr))
		goto out;
	if (dev_WARN_ONCE(dev, !slot, "syncs a bounced address that is not mapped: %pad\n", &addr))
		goto out;
	start = dma_bounce_slot_iova(slot) + slot->offset;
	inside = addr < start || addr - start > slot->len ? 0 : slot->len - (addr - start);
	/* Copy what is mapped, like swiotlb. Stale data would be worse than the warning. */
	if (dev_WARN_ONCE(dev, size > inside,
			  "syncs %zu bytes at %pad of a mapping of %u at %pad\n", size, &addr,
			  slot->len, &start))
		size = inside;
	if (size)
		dma_bounce_slot_sync(pool, dev, slot, NULL, addr - start, size, dir, for_device);
out:
	rcu_read_unlock();
	return true;
}

/**
 * __dma_bounce_sync_single - synchronise part of a mapped buffer
 * @dev: the device
 * @addr: start of the part in the mapping
 * @size: length of the part in bytes
 * @dir: direction of the transfers that the call is for
 * @for_device: true if the device gets the part, false if the CPU gets it
 *
 * A part of a list is looked up in the list that was mapped. A list with more than one entry must
 * still exist.
 *
 * Return: true if the address belongs to a pool.
 */
bool __dma_bounce_sync_single(struct device *dev, dma_addr_t addr, size_t size,
			      enum dma_data_direction dir, bool for_device)
{
	struct dma_bounce_pool *pool = dma_bounce_pool_of(dev);

	if (!pool)
		return false;
	if (dma_bounce_owns(pool, addr))
		return sync_single(pool, dev, addr, size, dir, for_device);
	return may_be_single(pool, dev) &&
	       dma_bounce_single_sync(pool, addr, size, dir, for_device);
}

static noinline bool sync_sg(struct dma_bounce_pool *pool, struct device *dev,
			     struct scatterlist *sgl, int nents, enum dma_data_direction dir,
			     bool for_device)
{
	dma_addr_t addr = sg_dma_address(sgl);
	struct dma_bounce_slot *slot;
	struct scatterlist *s;
	bool ours = false;
	size_t len = 0;
	int i;

	rcu_read_lock();
	slot = dma_bounce_slots_find(&pool->slots, addr);
	if (slot && (serves_list(slot) || is_lone_buffer(sgl, nents))) {
		ours = true;
		if (!is_list_of(dev, sgl, slot))
			goto out;
		for_each_sg(sgl, s, min_t(unsigned int, nents, max(slot->nents, 1)), i)
			len += s->length;
		dma_bounce_slot_sync(pool, dev, slot, sgl, 0, min_t(size_t, len, slot->len), dir,
				     for_device);
	} else if (!slot) {
		ours = is_lone_buffer(sgl, nents) && is_lent(pool, addr);
	}
out:
	rcu_read_unlock();
	return ours;
}

/**
 * __dma_bounce_sync_sg - synchronise a mapped list, or its first entries
 * @dev: the device
 * @sgl: the list
 * @nents: number of entries to synchronise
 * @dir: direction of the transfers that the call is for
 * @for_device: true if the device gets the entries, false if the CPU gets them
 *
 * Uses the lengths of the entries, because a packed list has fewer DMA lengths than entries.
 *
 * Return: true if the list was mapped by a slot.
 */
bool __dma_bounce_sync_sg(struct device *dev, struct scatterlist *sgl, int nents,
			  enum dma_data_direction dir, bool for_device)
{
	struct dma_bounce_pool *pool = dma_bounce_pool_of(dev);
	dma_addr_t addr = sg_dma_address(sgl);

	if (!pool)
		return false;
	if (dma_bounce_owns(pool, addr))
		return sync_sg(pool, dev, sgl, nents, dir, for_device);
	return may_be_single(pool, dev) && is_lone_buffer(sgl, nents) &&
	       dma_bounce_single_sync(pool, addr, sgl->length, dir, for_device);
}
