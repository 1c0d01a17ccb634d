// SPDX-License-Identifier: GPL-2.0-only
/*
 * Bouncing of small DMA: what is copied when
 *
 * Whatever the direction, a mapping copies the buffer to the slot, for bytes that the device does
 * not write must come back as they were, and what an earlier user left in the slot must not come
 * back at all. The exception costs the driver two attributes: nothing is copied at map with
 * DMA_ATTR_BOUNCE_NO_COPY_IN, and what the slot holds is copied back only if unmap vouches for
 * every byte of it with DMA_ATTR_BOUNCE_ALL_WRITTEN.
 *
 * All of this runs in an RCU read-side critical section: the memory of a slot stays until its end.
 */

#include <linux/blk-mq.h>
#include <linux/dma-mapping.h>
#include <linux/io.h>
#include <linux/mm.h>
#include <linux/scatterlist.h>

#include <trace/events/dma_bounce.h>

#include "dma-bounce-copy.h"

/*
 * On x86, memcpy() is one instruction where the CPU says that this is fast for few bytes too.
 * Otherwise it is a loop that moves 32 bytes at a time, where the instruction is fast for pages all
 * the same: copy_page() has it.
 */
static bool copy_by_page(void *to, void *from, size_t len)
{
#ifdef CONFIG_X86
	return !cpu_feature_enabled(X86_FEATURE_FSRM) &&
	       PAGE_ALIGNED((unsigned long)to | (unsigned long)from | len);
#else
	return false;
#endif
}

/**
 * dma_bounce_copy - copy between memory that is mapped and a bounce buffer
 * @buffer: the bounce buffer
 * @phys: the memory
 * @len: bytes
 * @to_buffer: to the bounce buffer; otherwise from it
 */
void dma_bounce_copy(void *buffer, phys_addr_t phys, size_t len, bool to_buffer)
{
	void *va = phys_to_virt(phys), *to = to_buffer ? buffer : va;
	void *from = to_buffer ? va : buffer;

	if (!copy_by_page(to, from, len)) {
		memcpy(to, from, len);
		return;
	}
	for (; len; len -= PAGE_SIZE, to += PAGE_SIZE, from += PAGE_SIZE)
		copy_page(to, from);
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

/* Copies @len bytes of a request's data that start @skip bytes into it. */
static void copy_request(void *slot, struct request *req, size_t skip, size_t len, bool to_slot)
{
	struct req_iterator iter;
	struct bio_vec bv;
	size_t part;

	rq_for_each_bvec(bv, req, iter) {
		if (skip >= bv.bv_len) {
			skip -= bv.bv_len;
			slot += bv.bv_len;
			continue;
		}
		part = min_t(size_t, bv.bv_len - skip, len);
		dma_bounce_copy(slot + skip, bvec_phys(&bv) + skip, part, to_slot);
		slot += bv.bv_len;
		len -= part;
		skip = 0;
		if (!len)
			break;
	}
}

/**
 * dma_bounce_slot_copy - copy part of what is mapped by a slot
 * @pool: its pool
 * @slot: the slot
 * @sgl: the list that it serves, as the caller has it: a copy of the one that was mapped may be all
 *	that there is. NULL if it has none; then it must be the one that was mapped.
 * @skip: where in the mapping the part starts
 * @len: its bytes
 * @to_slot: to the slot; otherwise from it
 */
void dma_bounce_slot_copy(struct dma_bounce_pool *pool, struct dma_bounce_slot *slot,
			  struct scatterlist *sgl, size_t skip, size_t len, bool to_slot)
{
	void *va = dma_bounce_slot_va(slot) + slot->offset;

	switch (slot->mapped) {
	case DMA_BOUNCE_SINGLE:
	case DMA_BOUNCE_ENTRY:
		dma_bounce_copy(va + skip, slot->phys + skip, len, to_slot);
		break;
	case DMA_BOUNCE_LIST:
		copy_sg(va, sgl ?: slot->sgl, slot->nents, skip, len, to_slot);
		break;
	default:
		if (IS_ENABLED(CONFIG_IOMMU_DMA_BOUNCE_REQUEST))
			copy_request(va, slot->req, skip, len, to_slot);
	}
	this_cpu_add(pool->slots.cpus->bytes[to_slot], len);
}

/**
 * __dma_bounce_slot_fill - copy to a slot at map; the rest of one for an untrusted device is zeroed
 * @pool: its pool
 * @dev: the device that maps
 * @slot: a slot that says what is mapped by it
 */
void __dma_bounce_slot_fill(struct dma_bounce_pool *pool, struct device *dev,
			    struct dma_bounce_slot *slot)
{
	if (dma_bounce_untrusted(dev))
		memset(dma_bounce_slot_va(slot), 0, dma_bounce_slot_size(slot));
	dma_bounce_slot_copy(pool, slot, NULL, 0, slot->len, true);
}

/**
 * dma_bounce_slot_trace - trace that something was mapped
 * @dev: the device that maps
 * @slot: the slot
 */
void dma_bounce_slot_trace(struct device *dev, struct dma_bounce_slot *slot)
{
	trace_dma_bounce_map(dev, dma_bounce_slot_iova(slot) + slot->offset, slot->len,
			     slot->nents, !slot->no_copy_in);
}

/**
 * dma_bounce_slot_trace_end - trace that something is unmapped
 * @dev: the device that unmaps
 * @slot: the slot
 * @copy: whether it was copied back
 */
void dma_bounce_slot_trace_end(struct device *dev, struct dma_bounce_slot *slot, bool copy)
{
	trace_dma_bounce_unmap(dev, dma_bounce_slot_iova(slot) + slot->offset, slot->len,
			       slot->nents, copy);
}

/**
 * dma_bounce_slot_sync - synchronise part of what is mapped by a slot
 * @pool: its pool
 * @dev: the device
 * @slot: the slot
 * @sgl: see dma_bounce_slot_copy()
 * @skip: where in the mapping the part starts
 * @len: its bytes; all of them are in the mapping
 * @dir: direction of the transfers that the call is about
 * @for_device: the device gets it; otherwise the CPU
 *
 * Nothing is copied to a slot for a device that is only to write: it may have written meanwhile.
 * Nothing comes back from a slot that the device was only to read: the CPU may have written.
 */
void dma_bounce_slot_sync(struct dma_bounce_pool *pool, struct device *dev,
			  struct dma_bounce_slot *slot, struct scatterlist *sgl, size_t skip,
			  size_t len, enum dma_data_direction dir, bool for_device)
{
	bool copy = dma_bounce_sync_copies(dir, for_device) &&
		    (for_device || slot->chunk->kind != DMA_BOUNCE_READ);

	dma_bounce_count(pool, DMA_BOUNCE_SYNCS, 1);
	if (READ_ONCE(slot->chunk->state) == DMA_BOUNCE_DEAD)
		return;
	/* The device may not have written all of it. */
	if (!for_device && copy && WARN_ON_ONCE(slot->no_copy_in))
		copy = false;
	if (copy)
		dma_bounce_slot_copy(pool, slot, sgl, skip, len, for_device);
	trace_dma_bounce_sync(dev, dma_bounce_slot_iova(slot) + slot->offset + skip, len,
			      for_device, copy);
}
