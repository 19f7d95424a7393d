"""The tables. Names and types are those that Fleet's verifiers read and compare.

`featured_hotels`, `hotel_deals` and `trending_destinations` are this app's own: Fleet's site shows
such lists, and no verifier defines where they are kept.
"""

CATALOGUE = """
create table locations(id integer primary key, name text not null, type text not null,
  city text not null, country text not null, latitude real not null, longitude real not null,
  created_at text not null);
create table hosts(id integer primary key, name text not null, is_superhost integer not null,
  response_rate integer not null, created_at text not null);
create table hotels(id integer primary key, host_id integer not null references hosts(id),
  name text not null, description text not null, property_type text not null,
  star_rating real not null, average_rating real not null, total_reviews integer not null,
  address text not null, neighborhood text not null, city text not null, country text not null,
  latitude real not null, longitude real not null, distance_to_center_km real not null,
  total_rooms integer not null, is_active integer not null default 1, created_at text not null,
  updated_at text not null);
create table hotel_images(id integer primary key, hotel_id integer not null references hotels(id),
  url text not null, caption text not null, created_at text not null);
create table rooms(id integer primary key, hotel_id integer not null references hotels(id),
  name text not null, room_type text not null, bed_type text not null, view_type text not null,
  base_price real not null, max_occupancy integer not null, adults_capacity integer not null,
  children_capacity integer not null, available_count integer not null, created_at text not null);
create table room_images(id integer primary key, room_id integer not null references rooms(id),
  url text not null, created_at text not null);
create table price_calendar(id integer primary key, room_id integer not null references rooms(id),
  date text not null, price real not null, created_at text not null);
create table rate_plans(id integer primary key, room_id integer not null references rooms(id),
  name text not null, cancellation_policy_type text not null);
create table rate_plan_prices(id integer primary key,
  rate_plan_id integer not null references rate_plans(id), date text not null,
  price real not null);
create table amenities(id integer primary key, name text not null unique, category text not null);
create table hotel_amenities(hotel_id integer not null references hotels(id),
  amenity_id integer not null references amenities(id), primary key (hotel_id, amenity_id));
create table facilities(id integer primary key, hotel_id integer not null references hotels(id),
  name text not null, category text not null, description text not null, created_at text not null);
create table property_policies(id integer primary key,
  hotel_id integer not null unique references hotels(id), check_in_from text not null,
  check_in_until text not null, check_out_until text not null,
  cancellation_policy_type text not null, free_cancellation_hours integer,
  pet_policy text not null, smoking_policy text not null, created_at text not null);
create table nearby_attractions(id integer primary key,
  hotel_id integer not null references hotels(id), name text not null, type text not null,
  distance_km real not null, walking_minutes integer not null, created_at text not null);
create table reviews(id integer primary key, hotel_id integer not null references hotels(id),
  reviewer_name text not null, title text not null, comment text not null, rating real not null,
  stay_date text not null, created_at text not null);
create table featured_hotels(position integer primary key,
  hotel_id integer not null unique references hotels(id));
create table hotel_deals(position integer primary key,
  hotel_id integer not null unique references hotels(id), title text not null);
create table trending_destinations(position integer primary key, city text not null unique,
  searches_past_month integer not null);
"""

ACCOUNTS = """
create table users(id integer primary key, email text not null unique, first_name text not null,
  last_name text not null, phone text, date_of_birth text, country text, address text,
  created_at text not null, last_active text not null);
create table rewards_program(user_id integer primary key references users(id),
  tier text not null, discount_percentage real not null, points integer not null,
  updated_at text not null);
create table payment_methods(id integer primary key, user_id integer not null references users(id),
  card_type text not null, last_four text not null, expiry_month integer not null,
  expiry_year integer not null, billing_address text, billing_postal_code text,
  is_default integer not null, is_saved_for_reuse integer not null, card_number text, cvv text,
  cardholder_name text, created_at text not null);
create table wishlist_lists(user_id text not null, list_name text not null,
  created_at text not null, primary key (user_id, list_name));
create table saved_properties(user_id integer not null references users(id),
  hotel_id integer not null references hotels(id), list_name text not null, notes text,
  saved_at text not null, primary key (user_id, hotel_id, list_name));
create table messages(id integer primary key, user_id integer not null references users(id),
  booking_id integer, subject text not null, body text not null, created_at text not null);
"""

BOOKINGS = """
create table bookings(id integer primary key, booking_reference text not null unique,
  user_id integer not null references users(id), hotel_id integer not null references hotels(id),
  room_id integer not null references rooms(id), check_in_date text not null,
  check_out_date text not null, booking_date text not null, adults integer not null,
  children integer not null, room_count integer not null, base_price real not null,
  taxes_fees real not null, total_price real not null, currency text not null,
  status text not null, payment_status text not null, special_requests text, arrival_time text,
  purpose_of_trip text, guest_first_name text, guest_last_name text, guest_email text,
  guest_phone_country_code text, guest_phone_number text, guest_country text,
  booking_group_id text, rooms_close_together integer not null default 0,
  payment_method_id integer references payment_methods(id),
  agreed_to_terms integer not null default 0, agreed_to_terms_at text,
  agreed_to_marketing integer not null default 0, agreed_to_marketing_at text,
  discount_percentage real not null default 0, discount_amount real not null default 0,
  original_price real, rewards_tier text, paperless_confirmation integer not null default 0,
  update_account_with_guest_details integer not null default 0, rate_plan_id integer,
  created_at text not null, updated_at text not null);
create table booking_extras(id integer primary key,
  booking_id integer not null references bookings(id), name text not null, price real not null,
  created_at text not null);
create table transactions(id integer primary key,
  booking_id integer not null references bookings(id), payment_method_id integer,
  amount real not null, currency text not null, transaction_type text not null,
  status text not null, gateway_response text, gateway_transaction_id text,
  processed_at text not null);
create table cancellations(id integer primary key,
  booking_id integer not null references bookings(id), cancelled_by text not null,
  cancellation_date text not null, reason text, refund_amount real not null,
  penalty_amount real not null, refund_status text not null, notes text,
  created_at text not null);
create table order_tokens(id integer primary key, token text not null unique,
  user_id integer not null references users(id), hotel_id integer not null,
  room_id integer not null, check_in_date text not null, check_out_date text not null,
  adults integer not null, children integer not null, room_count integer not null,
  base_price real not null, taxes_fees real not null, total_price real not null,
  discount_amount real not null,
  discount_percentage real not null, original_price real not null, rewards_tier text,
  currency text not null, expires_at text not null, created_at text not null);
create table booking_checkpoints(id integer primary key, user_id integer not null,
  state text not null, expires_at text not null, created_at text not null,
  updated_at text not null);
create table generation_checkpoints(id integer primary key, name text not null,
  created_at text not null);
"""

SCHEMA = CATALOGUE + ACCOUNTS + BOOKINGS
