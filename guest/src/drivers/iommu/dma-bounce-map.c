// SPDX-License-Identifier: GPL-2.0-only
/*
 * Bouncing of small DMA: mapping, unmapping and synchronising by slots
 *
 * These are the functions that dma-iommu.c calls first; it goes the ordinary way if they decline.
 * Which addresses are ours is decided by their range alone: nothing in a scatterlist would tell.
 */

#include <linux/device.h>
#include <linux/dma-map-ops.h>
#include <linux/iommu-dma.h>
#include <linux/iova.h>
#include <linux/memremap.h>
#include <linux/scatterlist.h>

#include "dma-bounce-copy.h"
#include "dma-bounce-lend.h"
#include "dma-bounce-map.h"
#include "dma-bounce-single.h"
#include "dma-bounce-take.h"

/*
 * Whether a mapping must bounce: the device is not trusted, and would see what else is in the
 * buffer's first and last page.
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
 * @phys: the buffer, which has pages
 * @size: its bytes
 * @dir: direction of the transfer
 * @attrs: attributes of the mapping
 *
 * Return: the address for the device, or DMA_MAPPING_ERROR if the buffer does not bounce.
 */
dma_addr_t __dma_bounce_map_page(struct device *dev, phys_addr_t phys, size_t size,
				 enum dma_data_direction dir, unsigned long attrs)
{
	struct dma_bounce_pool *pool = dma_bounce_pool_in(dev);
	struct page *page = pfn_to_page(PHYS_PFN(phys));
	dma_addr_t addr = DMA_MAPPING_ERROR;
	bool lent, required;
	size_t limit;

	if (!pool || !size)
		return addr;
	lent = dma_bounce_is_lent(page);
	if (lent && dma_bounce_usable(pool, dev)) {
		addr = dma_bounce_lent_map(pool, phys, size);
		if (addr != DMA_MAPPING_ERROR)
			return addr;
	}
	/* Memory that is lent for other devices is not to be mapped for this one. */
	required = lent || dma_bounce_required(pool, dev, phys, size);
	if ((!required && !dma_bounce_wanted(dev)) || !dma_bounce_attrs_allow(pool, dev, attrs))
		return addr;
	if (!lent && is_zone_device_page(page)) {
		dma_bounce_fallback(pool, dev, DMA_BOUNCE_FB_MEMORY);
		return addr;
	}
	limit = required ? DMA_BOUNCE_MAX_SLOT : dma_bounce_threshold(pool, dev);
	if (dma_bounce_usable(pool, dev))
		addr = map_by_slot(pool, dev, phys, size, limit, dir, attrs);
	if (addr == DMA_MAPPING_ERROR && required)
		addr = dma_bounce_single_map(pool, dma_bounce_mask(dev), phys, size, dir, attrs);
	if (addr != DMA_MAPPING_ERROR)
		dma_bounce_reset_need_sync(pool, dev);
	return addr;
}

/**
 * __dma_bounce_by_piece - whether pieces of a larger mapping are to be mapped each by itself
 * @dev: the device
 *
 * Return: true for a device that is not trusted: those that do not fill their pages must bounce.
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
		if (dma_bounce_is_lent(sg_page(s)))
			return true;
	return false;
}

/**
 * __dma_bounce_by_entry - whether the entries of a list are to be mapped each by itself
 * @dev: the device
 * @sgl: the list, which is not bounced as a whole
 * @nents: its entries
 *
 * Return: true if there is lent memory in it, which has its address already, or must be copied.
 */
bool __dma_bounce_by_entry(struct device *dev, struct scatterlist *sgl, int nents)
{
	return dma_bounce_lends() && dma_bounce_pool_in(dev) && sg_has_lent(sgl, nents);
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
			if (!dma_bounce_is_lent(sg_page(s)))
				dma_bounce_fallback(pool, dev, DMA_BOUNCE_FB_MEMORY);
			return 0;
		}
		/* Each piece follows the one before it: are its low bits the right ones then? */
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
	/* A slot is aligned to its size and never crosses a boundary that is not below that. */
	if (dma_get_seg_boundary(dev) < DMA_BOUNCE_MAX_SLOT - 1) {
		dma_bounce_fallback(pool, dev, DMA_BOUNCE_FB_LAYOUT);
		return 0;
	}
	return len;
}

/*
 * Writes the DMA segments into the list: one, or as few as max_seg_size allows. Entries behind them
 * have a DMA length of 0, which some users take for the end, and no address: what an earlier
 * mapping left there may be a place of another list by now.
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
 * @nents: its entries
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
	 * Whatever an earlier mapping of the list left here must not make the sync call within
	 * iommu_dma_map_sg() take it for a bounced one.
	 */
	sg_dma_address(sgl) = DMA_MAPPING_ERROR;
	/* Lists of untrusted devices that do not bounce as a whole come back here by entry. */
	pool = dma_bounce_pool_for(dev, attrs);
	if (!pool)
		return 0;
	limit = dma_bounce_threshold(pool, dev);
	len = sg_packable(pool, dev, sgl, nents, limit);
	if (!len)
		return 0;
	rcu_read_lock();
	slot = dma_bounce_slot_take(pool, dev, sg_phys(sgl), len, limit, dir,
				    nents == 1 ? DMA_BOUNCE_ENTRY : DMA_BOUNCE_LIST);
	if (slot) {
		slot->nents = nents;
		/* Some who map a lone entry have it on their stack, and synchronise by address. */
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
 * Whether an address outside of the pool's range may be of a buffer for one mapping. For most
 * devices it cannot, which is known without a look at the pool.
 */
static __always_inline bool may_be_single(struct dma_bounce_pool *pool, struct device *dev)
{
	return (dma_bounce_untrusted(dev) || dma_bounce_lends()) &&
	       atomic_read(&pool->nsingle_use);
}

/**
 * dma_bounce_need_sync - whether a mapping of a device in a DMA domain is to be synchronised
 * @dev: the device, some of whose mappings have bounced
 * @addr: an address in the mapping
 *
 * Return: true for what bounces, by swiotlb too, and for a device that is not coherent.
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
 * Whether an address for which there is no slot is one of lent memory: then there is nothing to do
 * to it
 */
static bool is_lent(struct dma_bounce_pool *pool, dma_addr_t addr)
{
	return dma_bounce_slots_whole(&pool->slots, addr);
}

/* Whether a list is the one that a slot serves, from its start */
static bool is_list_of(struct device *dev, struct scatterlist *sgl, struct dma_bounce_slot *slot)
{
	dma_addr_t addr = sg_dma_address(sgl);

	return !dev_WARN_ONCE(dev, addr != dma_bounce_slot_iova(slot) + slot->offset,
			      "no start of a bounced list: %pad\n", &addr);
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
	/* A list of one entry may be unmapped as what it is. */
	if (!dev_WARN_ONCE(dev, !slot || slot->mapped > DMA_BOUNCE_ENTRY ||
			   addr != dma_bounce_slot_iova(slot) + slot->offset,
			   "unmaps a bounced address that is not mapped: %pad\n", &addr))
		dma_bounce_slot_finish(pool, dev, slot, NULL, attrs);
out:
	rcu_read_unlock();
	return true;
}

/*
 * Whether a list is one buffer that was mapped as such: mainline lets a list of one entry be
 * unmapped that was not mapped as a list. Those of swiotlb's users are unmapped by entry anyhow.
 */
static bool is_lone_buffer(struct scatterlist *sgl, int nents)
{
	return nents == 1 && !sg_dma_is_swiotlb(sgl);
}

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

/* Not inlined: sync calls of what did not bounce come and go without saving a register. */
static noinline bool sync_single(struct dma_bounce_pool *pool, struct device *dev, dma_addr_t addr,
				 size_t size, enum dma_data_direction dir, bool for_device)
{
	struct dma_bounce_slot *slot;
	dma_addr_t start;

	rcu_read_lock();
	slot = dma_bounce_slots_find(&pool->slots, addr);
	if (!slot && is_lent(pool, addr))
		goto out;
	if (dev_WARN_ONCE(dev, !slot, "syncs a bounced address that is not mapped: %pad\n", &addr))
		goto out;
	start = dma_bounce_slot_iova(slot) + slot->offset;
	if (dev_WARN_ONCE(dev, addr < start || addr - start > slot->len ||
			  size > slot->len - (addr - start),
			  "syncs %zu bytes at %pad of a mapping of %u at %pad\n", size, &addr,
			  slot->len, &start))
		goto out;
	dma_bounce_slot_sync(pool, dev, slot, NULL, addr - start, size, dir, for_device);
out:
	rcu_read_unlock();
	return true;
}

/**
 * __dma_bounce_sync_single - synchronise part of a mapped buffer
 * @dev: the device
 * @addr: where in the mapping the part starts
 * @size: its bytes
 * @dir: direction of the transfers that the call is about
 * @for_device: the device gets it; otherwise the CPU
 *
 * A part of a list is looked for in the list that was mapped, which must be there still if it has
 * more than one entry.
 *
 * Return: true if the address was one of a pool.
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
 * @nents: entries to synchronise
 * @dir: direction of the transfers that the call is about
 * @for_device: the device gets them; otherwise the CPU
 *
 * Lengths are those of the entries: DMA lengths of a packed list mean nothing after the first.
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
