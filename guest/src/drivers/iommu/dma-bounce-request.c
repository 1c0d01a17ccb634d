// SPDX-License-Identifier: GPL-2.0-only
/*
 * Bouncing block requests as a whole
 *
 * In newer kernels, a block request has no scatterlist. Its driver maps the pieces one by one, or
 * links them into one range of IOVA. A request that bounces takes one slot instead. The slot need
 * not record the pieces: a request is unmapped before it is completed, and has its pieces until
 * then.
 */

#include <linux/blk-mq-dma.h>
#include <linux/dma-mapping.h>
#include <linux/iommu-dma.h>
#include <linux/memremap.h>

#include "dma-bounce-copy.h"
#include "dma-bounce-device.h"
#include "dma-bounce-lend.h"
#include "dma-bounce-take.h"

/*
 * Returns the length of a request if it can be packed into one slot, and stores the address of its
 * first byte in @start. Otherwise returns 0, and stores the reason in @reason.
 */
static size_t request_packable(struct device *dev, struct request *req, size_t limit,
			       phys_addr_t *start, enum dma_bounce_stat *reason)
{
	unsigned int align = dma_get_min_align_mask(dev);
	struct req_iterator iter;
	struct bio_vec bv;
	size_t len = 0;

	*reason = DMA_BOUNCE_FB_LAYOUT;
	/*
	 * The mapping is one segment. A slot is aligned to its size, so the segment crosses no
	 * boundary of at least that size.
	 */
	if (req->rq_flags & RQF_SPECIAL_PAYLOAD || !req->bio ||
	    dma_get_seg_boundary(dev) < DMA_BOUNCE_MAX_SLOT - 1)
		return 0;
	if (blk_rq_payload_bytes(req) > min_t(size_t, limit, dma_get_max_seg_size(dev))) {
		*reason = DMA_BOUNCE_FB_SIZE;
		return 0;
	}
	rq_for_each_bvec(bv, req, iter) {
		/* The caller looks for lent memory, which is no reason to count. */
		if (dma_bounce_is_lent(bv.bv_page) || !dma_bounce_can_copy(bv.bv_page)) {
			*reason = DMA_BOUNCE_FB_MEMORY;
			return 0;
		}
		if (!len)
			*start = bvec_phys(&bv);
		/* Pieces are packed without gaps. Check that the address keeps its low bits. */
		else if (((*start + len) ^ bvec_phys(&bv)) & align)
			return 0;
		len += bv.bv_len;
	}
	return len == blk_rq_payload_bytes(req) ? len : 0;
}

static bool request_has_lent(struct request *req)
{
	struct req_iterator iter;
	struct bio_vec bv;

	if (req->rq_flags & RQF_SPECIAL_PAYLOAD)
		return false;
	rq_for_each_bvec(bv, req, iter)
		if (dma_bounce_is_on_loan(bv.bv_page))
			return true;
	return false;
}

/**
 * dma_bounce_request_by_piece - check if the pieces of a request must be mapped one by one
 * @req: the request
 * @dma_dev: the device of the request
 *
 * Return: true if the request contains lent memory. Lent memory already has an address for the
 * device, or must be copied.
 */
bool dma_bounce_request_by_piece(struct request *req, struct device *dma_dev)
{
	return dma_bounce_lends() && use_dma_iommu(dma_dev) && dma_bounce_pool_in(dma_dev) &&
	       request_has_lent(req);
}

/**
 * dma_bounce_map_request - map a whole block request through one slot
 * @req: the request
 * @dma_dev: the device of the request
 * @state: set to the IOVA range of the mapping, for dma_bounce_unmap_request()
 * @iter: set to the DMA address and length of the mapping, which is a single segment
 * @attrs: attributes of the mapping
 *
 * A driver must call this function before blk_rq_dma_map_iter_start().
 *
 * Return: true if the request was mapped. Then the driver unmaps it with
 * dma_bounce_unmap_request(). If false, @state and @iter have not changed, and the driver maps the
 * pieces one by one. Single pieces may still bounce.
 */
bool dma_bounce_map_request(struct request *req, struct device *dma_dev,
			    struct dma_iova_state *state, struct blk_dma_iter *iter,
			    unsigned long attrs)
{
	struct dma_bounce_pool *pool;
	struct dma_bounce_slot *slot;
	enum dma_bounce_stat reason;
	phys_addr_t start;
	size_t len, limit;

	if (!static_branch_unlikely(&dma_bounce_key) || !use_dma_iommu(dma_dev))
		return false;
	pool = dma_bounce_pool_for(dma_dev, attrs);
	if (!pool)
		return false;
	limit = dma_bounce_threshold(pool, dma_dev, rq_dma_dir(req));
	len = request_packable(dma_dev, req, limit, &start, &reason);
	if (!len) {
		if (!dma_bounce_lends() || !request_has_lent(req))
			dma_bounce_fallback(pool, dma_dev, reason);
		return false;
	}
	rcu_read_lock();
	slot = dma_bounce_slot_take(pool, dma_dev, start, len, limit, rq_dma_dir(req),
				    DMA_BOUNCE_REQUEST);
	if (slot) {
		slot->req = req;
		slot->nents = 0;
		dma_bounce_slot_fill(pool, dma_dev, slot, rq_dma_dir(req), attrs);
		*iter = (struct blk_dma_iter) {
			.addr = dma_bounce_slot_iova(slot) + slot->offset,
			.len = len,
			.p2pdma.map = PCI_P2PDMA_MAP_NONE,
		};
		*state = (struct dma_iova_state) { .addr = iter->addr, .__size = len };
		dma_bounce_reset_need_sync(pool, dma_dev);
	}
	rcu_read_unlock();
	return slot;
}
EXPORT_SYMBOL_GPL(dma_bounce_map_request);

/**
 * dma_bounce_unmap_request - unmap all data of a block request
 * @req: the request, which is not completed yet
 * @dma_dev: the device of the request
 * @state: state that dma_bounce_map_request() set
 * @attrs: attributes of the unmapping
 */
void dma_bounce_unmap_request(struct request *req, struct device *dma_dev,
			      struct dma_iova_state *state, unsigned long attrs)
{
	struct dma_bounce_pool *pool = dma_bounce_pool_of(dma_dev);
	struct dma_bounce_slot *slot = NULL;

	rcu_read_lock();
	if (pool && dma_bounce_owns(pool, state->addr))
		slot = dma_bounce_slots_find(&pool->slots, state->addr);
	if (!dev_WARN_ONCE(dma_dev, !slot || slot->mapped != DMA_BOUNCE_REQUEST || slot->req != req,
			   "unmaps a bounced request that is not mapped: %pad\n", &state->addr))
		dma_bounce_slot_finish(pool, dma_dev, slot, NULL, attrs);
	rcu_read_unlock();
}
EXPORT_SYMBOL_GPL(dma_bounce_unmap_request);
