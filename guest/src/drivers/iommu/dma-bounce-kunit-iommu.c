// SPDX-License-Identifier: GPL-2.0-only
/*
 * A software IOMMU with one device behind it, for KUnit tests of bounced DMA
 *
 * The device's DMA goes through the IOMMU's table, page by page. So a test can act as any device,
 * also as a device that tries to access forbidden memory. The IOMMU provides bounce memory, as an
 * IOMMU with windows does.
 */

#include <kunit/test.h>
#include <linux/cleanup.h>
#include <linux/dma-map-ops.h>
#include <linux/dma-mapping.h>
#include <linux/gfp.h>
#include <linux/mutex.h>
#include <linux/platform_device.h>
#include <linux/property.h>
#include <linux/slab.h>

#include "dma-bounce-device.h"
#include "dma-bounce-kunit-iommu.h"
#include "dma-bounce-types.h"

/* Permissions, in the low bits of a table entry. The other bits are a memory page's number. */
#define FAKE_PROT	(IOMMU_READ | IOMMU_WRITE)

static struct fake_iommu *the_fake;

static struct fake_iommu *to_fake(struct iommu_domain *domain)
{
	return container_of(domain, struct fake_iommu, domain);
}

static int fake_set(struct fake_iommu *fake, unsigned long iova, phys_addr_t phys, int prot,
		    gfp_t gfp)
{
	void *entry = xa_mk_value((phys >> PAGE_SHIFT << 2) | (prot & FAKE_PROT));
	unsigned long flags;
	void *old;

	xa_lock_irqsave(&fake->table, flags);
	old = __xa_store(&fake->table, iova >> PAGE_SHIFT, entry, gfp);
	xa_unlock_irqrestore(&fake->table, flags);
	if (WARN_ON(old && !xa_is_err(old)))
		return -EEXIST;
	return xa_err(old);
}

static bool fake_clear(struct fake_iommu *fake, unsigned long iova)
{
	unsigned long flags;
	void *old;

	xa_lock_irqsave(&fake->table, flags);
	old = __xa_erase(&fake->table, iova >> PAGE_SHIFT);
	xa_unlock_irqrestore(&fake->table, flags);
	return old;
}

static int fake_map_pages(struct iommu_domain *domain, unsigned long iova, phys_addr_t paddr,
			  size_t pgsize, size_t pgcount, int prot, gfp_t gfp, size_t *mapped)
{
	struct fake_iommu *fake = to_fake(domain);
	int ret;

	for (; pgcount; pgcount--, iova += PAGE_SIZE, paddr += PAGE_SIZE) {
		/* fake_set() allocates while it holds a lock with interrupts off. */
		ret = fake_set(fake, iova, paddr, prot, GFP_ATOMIC);
		if (ret)
			return ret;
		fake->maps++;
		*mapped += PAGE_SIZE;
	}
	return 0;
}

static size_t fake_unmap_pages(struct iommu_domain *domain, unsigned long iova, size_t pgsize,
			       size_t pgcount, struct iommu_iotlb_gather *gather)
{
	size_t done;

	for (done = 0; done < pgcount * PAGE_SIZE; done += PAGE_SIZE)
		if (!fake_clear(to_fake(domain), iova + done))
			break;
	return done;
}

static phys_addr_t fake_iova_to_phys(struct iommu_domain *domain, dma_addr_t iova)
{
	void *entry = xa_load(&to_fake(domain)->table, iova >> PAGE_SHIFT);

	return entry ? (xa_to_value(entry) >> 2 << PAGE_SHIFT) + offset_in_page(iova) : 0;
}

/* The kernels that pass the old domain to attach_dev are those with kunit_warning_suppress(). */
#ifdef kunit_warning_suppress
static int fake_attach_dev(struct iommu_domain *domain, struct device *dev,
			   struct iommu_domain *old)
#else
static int fake_attach_dev(struct iommu_domain *domain, struct device *dev)
#endif
{
	return 0;
}

static void fake_free(struct iommu_domain *domain)
{
	/* The domain is a member of struct fake_iommu, which the test frees. */
}

/* The provider of bounce memory */

static struct fake_iommu *fake_giver(struct fake_iommu *fake)
{
	return fake->shares_with ?: fake;
}

static int fake_limits(struct iommu_domain *domain, struct dma_bounce_limits *limits)
{
	struct fake_iommu *giver = fake_giver(to_fake(domain));
	unsigned int most = READ_ONCE(giver->most), given = atomic_read(&giver->given);

	limits->iova = FAKE_WINDOW_IOVA;
	limits->len = FAKE_WINDOW_LEN;
	limits->chunk_size = FAKE_CHUNK;
	limits->budget = READ_ONCE(to_fake(domain)->budget);
	limits->threshold.read = DMA_BOUNCE_MAX_SLOT;
	limits->source = giver;
	limits->surplus = most && given > most ? given - most : 0;
	return 0;
}

static void *fake_add(struct iommu_domain *domain, dma_addr_t iova, size_t *size, int prot)
{
	struct fake_iommu *fake = to_fake(domain), *giver = fake_giver(fake);
	unsigned int most = READ_ONCE(giver->most);
	struct page *page;
	size_t i;

	if (fake->adding)
		fake->adding(domain->bounce);
	if (iova == fake->refuse_add)
		return ERR_PTR(-EIO);
	if (most && atomic_read(&giver->given) >= most)
		return ERR_PTR(-ENOMEM);
	page = alloc_pages(GFP_KERNEL | __GFP_ZERO, get_order(*size));
	if (!page)
		return ERR_PTR(-ENOMEM);
	for (i = 0; i < *size; i += PAGE_SIZE)
		if (fake_set(fake, iova + i, page_to_phys(page) + i, prot, GFP_ATOMIC))
			goto err_clear;
	atomic_inc(&giver->given);
	return page_address(page);

err_clear:
	while (i) {
		i -= PAGE_SIZE;
		fake_clear(fake, iova + i);
	}
	__free_pages(page, get_order(*size));
	return ERR_PTR(-ENOMEM);
}

static bool fake_del(struct iommu_domain *domain, dma_addr_t iova, void *va, size_t size)
{
	struct fake_iommu *fake = to_fake(domain);
	size_t i;

	if (READ_ONCE(fake->refuse_del)) {
		WRITE_ONCE(fake->refused, fake->refused + 1);
		return false;
	}
	for (i = 0; i < size; i += PAGE_SIZE)
		WARN_ON(!fake_clear(fake, iova + i));
	free_pages((unsigned long)va, get_order(size));
	atomic_dec(&fake_giver(fake)->given);
	return true;
}

static bool fake_held(struct iommu_domain *domain, void *va, size_t size)
{
	struct fake_iommu *fake = to_fake(domain);

	return READ_ONCE(fake->held) &&
	       fake_device_page(fake, READ_ONCE(fake->held) >> PAGE_SHIFT,
				IOMMU_READ | IOMMU_WRITE) == va;
}

static const struct dma_bounce_ops fake_bounce_ops = {
	.name	= "fake",
	.limits	= fake_limits,
	.add	= fake_add,
	.del	= fake_del,
	.held	= fake_held,
};

static const struct iommu_domain_ops fake_domain_ops = {
	.attach_dev	= fake_attach_dev,
	.map_pages	= fake_map_pages,
	.unmap_pages	= fake_unmap_pages,
	.iova_to_phys	= fake_iova_to_phys,
	.free		= fake_free,
	.bounce_ops	= &fake_bounce_ops,
};

/* The IOMMU */

static struct iommu_domain *fake_domain_alloc(struct device *dev)
{
	struct iommu_domain *domain = &the_fake->domain;

	domain->ops = &fake_domain_ops;
	domain->pgsize_bitmap = PAGE_SIZE;
	domain->geometry.aperture_end = DMA_BIT_MASK(40);
	domain->geometry.force_aperture = true;
	return domain;
}

static struct iommu_device *fake_probe_device(struct device *dev)
{
	return the_fake && dev == the_fake->dev ? &the_fake->iommu : ERR_PTR(-ENODEV);
}

static int fake_def_domain_type(struct device *dev)
{
	return IOMMU_DOMAIN_DMA;
}

static bool fake_capable(struct device *dev, enum iommu_cap cap)
{
	return cap == IOMMU_CAP_CACHE_COHERENCY;
}

/* Does not report the range of its chunks as reserved, as a real IOMMU should. */
static const struct iommu_ops fake_ops = {
	.capable		= fake_capable,
	.domain_alloc_paging	= fake_domain_alloc,
	.probe_device		= fake_probe_device,
	.device_group		= generic_device_group,
	.def_domain_type	= fake_def_domain_type,
	.owner			= THIS_MODULE,
};

static int fake_add_device(struct fake_iommu *fake)
{
	int ret;

	fake->pdev = platform_device_alloc("dma-bounce-kunit-device", PLATFORM_DEVID_NONE);
	if (!fake->pdev)
		return -ENOMEM;
	fake->dev = &fake->pdev->dev;
	/* Make the device coherent, as a bus does. Non-coherent devices do not bounce. */
	arch_setup_dma_ops(fake->dev, true);
	scoped_guard(mutex, &iommu_probe_device_lock)
		ret = iommu_fwspec_init(fake->dev, dev_fwnode(fake->hw));
	/* The bus notifies the IOMMU layer, which makes the domain. */
	if (!ret)
		ret = platform_device_add(fake->pdev);
	if (!ret && !fake->domain.bounce)
		ret = -ENODEV;
	/* Set the masks, as drivers do. This call also decides whether sync calls are elided. */
	return ret ?: dma_set_mask_and_coherent(fake->dev, DMA_BIT_MASK(64));
}

/**
 * fake_iommu_create - make the IOMMU and its device
 *
 * Return: the IOMMU and its device, or NULL on failure.
 */
struct fake_iommu *fake_iommu_create(void)
{
	struct fake_iommu *fake = kzalloc(sizeof(*fake), GFP_KERNEL);
	struct fwnode_handle *node;

	if (!fake)
		return NULL;
	xa_init_flags(&fake->table, XA_FLAGS_LOCK_IRQ);
	fake->budget = SZ_4M;
	fake->hw = root_device_register("dma-bounce-kunit-iommu");
	if (IS_ERR(fake->hw))
		goto err_free;
	node = fwnode_create_software_node(NULL, NULL);
	if (IS_ERR(node))
		goto err_unregister_hw;
	set_primary_fwnode(fake->hw, node);
	if (iommu_device_sysfs_add(&fake->iommu, NULL, NULL, "dma-bounce-kunit"))
		goto err_free_node;
	the_fake = fake;
	if (iommu_device_register(&fake->iommu, &fake_ops, fake->hw))
		goto err_remove_sysfs;
	if (!fake_add_device(fake))
		return fake;
	fake_iommu_destroy(fake);
	return NULL;

err_remove_sysfs:
	the_fake = NULL;
	iommu_device_sysfs_remove(&fake->iommu);
err_free_node:
	set_primary_fwnode(fake->hw, NULL);
	fwnode_remove_software_node(node);
err_unregister_hw:
	root_device_unregister(fake->hw);
err_free:
	kfree(fake);
	return NULL;
}

/**
 * fake_iommu_destroy - free what fake_iommu_create() made
 * @fake: result of fake_iommu_create()
 */
void fake_iommu_destroy(struct fake_iommu *fake)
{
	struct fwnode_handle *node = dev_fwnode(fake->hw);

	if (fake->pdev) {
		if (device_is_registered(fake->dev))
			platform_device_del(fake->pdev);
		platform_device_put(fake->pdev);
	}
	iommu_device_unregister(&fake->iommu);
	the_fake = NULL;
	iommu_device_sysfs_remove(&fake->iommu);
	set_primary_fwnode(fake->hw, NULL);
	fwnode_remove_software_node(node);
	root_device_unregister(fake->hw);
	WARN_ON(!xa_empty(&fake->table));
	xa_destroy(&fake->table);
	kfree(fake);
}

/**
 * fake_domain_create - make another domain of the IOMMU, without devices
 * @fake: the IOMMU
 *
 * The domain's pool gets its chunks from the same provider. The domain uses the IOVA allocator of
 * the first domain, in which the range of chunks is already reserved.
 *
 * Return: the structure that contains the domain, or NULL on failure.
 */
struct fake_iommu *fake_domain_create(struct fake_iommu *fake)
{
	struct fake_iommu *other = kzalloc(sizeof(*other), GFP_KERNEL);

	if (!other)
		return NULL;
	xa_init_flags(&other->table, XA_FLAGS_LOCK_IRQ);
	other->budget = fake->budget;
	other->shares_with = fake;
	other->domain.ops = &fake_domain_ops;
	dma_bounce_init_domain(&other->domain, fake->dev, fake->domain.bounce->iovad);
	/* Undo the change of the device's pool: the device stays in the first domain. */
	fake->dev->iommu->bounce.pool = fake->domain.bounce;
	if (other->domain.bounce)
		return other;
	kfree(other);
	return NULL;
}

/**
 * fake_domain_destroy - free what fake_domain_create() made
 * @other: result of fake_domain_create()
 */
void fake_domain_destroy(struct fake_iommu *other)
{
	dma_bounce_free_domain(&other->domain);
	WARN_ON(!xa_empty(&other->table));
	xa_destroy(&other->table);
	kfree(other);
}

/**
 * fake_set_most - limit the number of chunks that all domains together get from the provider
 * @fake: the IOMMU
 * @most: number of chunks
 */
void fake_set_most(struct fake_iommu *fake, unsigned int most)
{
	WRITE_ONCE(fake->most, most);
	dma_bounce_limits_changed(&fake_bounce_ops);
}

/**
 * fake_set_budget - set the budget of the device's domain
 * @fake: the IOMMU
 * @budget: number of bytes
 */
void fake_set_budget(struct fake_iommu *fake, u64 budget)
{
	WRITE_ONCE(fake->budget, budget);
	dma_bounce_limits_changed(&fake_bounce_ops);
}

/* Accesses of the device */

/**
 * fake_device_page - get the memory that the device reaches through a page of IOVA
 * @fake: the IOMMU
 * @pfn: number of the page
 * @prot: access of the device, IOMMU_READ or IOMMU_WRITE
 *
 * Return: the page, or NULL if the IOMMU does not allow the access.
 */
void *fake_device_page(struct fake_iommu *fake, unsigned long pfn, int prot)
{
	void *entry = xa_load(&fake->table, pfn);

	if (!entry || !(xa_to_value(entry) & prot))
		return NULL;
	return phys_to_virt(xa_to_value(entry) >> 2 << PAGE_SHIFT);
}

static bool fake_device_access(struct fake_iommu *fake, dma_addr_t addr, void *buf, size_t len,
			       bool write)
{
	size_t part;
	void *page;

	for (; len; len -= part, addr += part, buf += part) {
		part = min_t(size_t, len, PAGE_SIZE - offset_in_page(addr));
		page = fake_device_page(fake, addr >> PAGE_SHIFT, write ? IOMMU_WRITE : IOMMU_READ);
		if (!page)
			return false;
		if (write)
			memcpy(page + offset_in_page(addr), buf, part);
		else
			memcpy(buf, page + offset_in_page(addr), part);
	}
	return true;
}

/**
 * fake_device_read - read memory as the device
 * @fake: the IOMMU
 * @addr: address to read from
 * @to: buffer for the bytes
 * @len: number of bytes
 *
 * Return: false if the IOMMU did not allow the whole access.
 */
bool fake_device_read(struct fake_iommu *fake, dma_addr_t addr, void *to, size_t len)
{
	return fake_device_access(fake, addr, to, len, false);
}

/**
 * fake_device_write - write memory as the device
 * @fake: the IOMMU
 * @addr: address to write to
 * @from: bytes to write
 * @len: number of bytes
 *
 * Return: false if the IOMMU did not allow the whole access.
 */
bool fake_device_write(struct fake_iommu *fake, dma_addr_t addr, const void *from, size_t len)
{
	return fake_device_access(fake, addr, (void *)from, len, true);
}
